// A rollout token by token. A hundred thousand tokens are a few hundred chunks, of which only those near the screen are in
// the document.
"use strict";

const CHUNK = 400;
const CHUNKS_MARGIN = 1200;
const ADDRESS_AFTER_MS = 300;

const SHADES = ["s0", "s1", "s2", "s3", "s4"];
/** The shares of a rollout's sampled tokens up to the bounds between the five shades: few tokens stand out. */
const SHARES = [0.5, 0.75, 0.9, 0.97];
/**
 * What tokens may be coloured by: of a token's details a number, null where it has none, and what it is called; `needs`
 * is what a rollout has to have. The bounds are the rollout's own, by SHARES, except where a colouring names them.
 */
const COLOURINGS = {
  "log-prob": { of: ({ logprob }) => (logprob === null ? null : -logprob), called: "minus the log-prob, nats" },
  ratio: { needs: "ratios", of: ({ ratio }) => (ratio === null ? null : Math.abs(Math.log(ratio))), called: "log of the ratio, either way" },
  gap: { needs: "old_logprobs", of: ({ learner, logprob }) => (learner === null ? null : Math.abs(learner - logprob)), called: "gap of sampler and learner, nats" },
  advantage: {
    needs: "advantages",
    of: ({ advantage }) => advantage,
    bounds: [-0.5, -0.05, 0.05, 0.5],
    shades: ["below2", "below1", "s0", "above1", "above2"],
    called: "advantage",
  },
  entropy: { needs: "entropies", of: ({ entropy }) => entropy, called: "entropy, nats" },
};

/** A colouring with its bounds for a rollout, and the numbers that each shade stands for. */
function scaleOf(name, rollout, details) {
  const colouring = COLOURINGS[name];
  const values = colouring.bounds ? [] : rollout.mask.map((sampled, i) => (sampled ? colouring.of(details(i)) : null)).filter((value) => value !== null).sort((a, b) => a - b);
  const bounds = colouring.bounds ?? SHARES.map((share) => values[Math.min(Math.ceil(share * values.length) - 1, values.length - 2)] ?? 0);
  const texts = bounds.map((bound) => Number(bound.toPrecision(2)));
  const says = [`to ${texts[0]}`, ...texts.slice(1).map((text, i) => `${texts[i]} to ${text}`), `above ${texts.at(-1)}`];
  return { shades: SHADES, ...colouring, bounds, says };
}

/** The class of a token by the colouring's number; "" for one that has none. */
function shadeOf({ of, bounds, shades }, token) {
  const value = of(token);
  return value === null ? "" : ` ${shades[bounds.filter((bound) => value > bound).length]}`;
}

/** The facts of token i: the mask, the turn, log-probs and, where the trainer left them, ratio and clip. */
function tokenDetails(rollout) {
  const sampledBefore = new Int32Array(rollout.mask.length);
  let count = 0;
  rollout.mask.forEach((sampled, i) => {
    sampledBefore[i] = count;
    count += sampled;
  });
  return (i) => {
    const sampled = Boolean(rollout.mask[i]);
    const turn = rollout.turns.findIndex((item) => item.start <= i && i < item.end);
    const pick = (values) => (sampled ? values?.[sampledBefore[i]] ?? null : null);
    return {
      text: rollout.tokens.texts[rollout.tokens.index[i]],
      id: rollout.tokens.ids[i],
      sampled,
      turn: turn < 0 ? null : turnsBefore(rollout) + turn + 1,
      policy: policyFact(rollout, rollout.turns[turn]?.policy_version),
      logprob: sampled ? rollout.logprobs[i] : null,
      learner: pick(rollout.old_logprobs),
      ratio: pick(rollout.ratios),
      clipped: pick(rollout.clipped),
      advantage: pick(rollout.advantages),
      entropy: pick(rollout.entropies),
    };
  };
}

const visible = (text) => text.replace(CONTROLS, controlName).replace(/\n/g, "↵\n").replace(/\t/g, "→\t");

/** Tokens [start, end) as spans; never drawn again for a selection, which is a class set from outside. */
class Chunk extends Component {
  shouldComponentUpdate(next) {
    return next.mounted !== this.props.mounted || next.rollout !== this.props.rollout || next.colouring !== this.props.colouring;
  }

  render({ start, end, mounted, height, details, colouring }) {
    const style = mounted ? {} : { height };
    const spans = [];
    for (let i = start; mounted && i < end; i++) {
      const token = details(i);
      const name = `token${shadeOf(colouring, token)}${token.clipped ? " clipped" : ""}`;
      spans.push(html`<span class=${name} id=${`t${i}`} data-i=${i}>${visible(token.text)}</span>`);
    }
    return html`<div class=${`chunk ${mounted ? "mounted" : ""}`} data-chunk=${start} style=${style}>${spans}</div>`;
  }
}

function TokenPanel({ token, i, size }) {
  if (!token) return html`<div class="token-panel quiet">choose a token, or press → · ↑ ↓ jump between turns</div>`;
  const facts = [
    ["position", `${i + 1} of ${size}`],
    ["id", token.id],
    ["", token.sampled ? `sampled in turn ${token.turn}` : "not sampled"],
    ...(token.sampled
      ? [
          token.policy,
          ["log-prob", fixed(token.logprob, 4)],
          ["probability", fixed(Math.exp(token.logprob), 4)],
        ]
      : []),
    ...(token.learner !== null ? [["learner", fixed(token.learner, 4)]] : []),
    ...(token.ratio !== null ? [["ratio", fixed(token.ratio, 4)]] : []),
    ...(token.clipped !== null ? [["clipped", token.clipped ? "yes" : "no"]] : []),
    ...(token.advantage !== null ? [["advantage", fixed(token.advantage, 4)]] : []),
    ...(token.entropy !== null ? [["entropy", fixed(token.entropy, 4)]] : []),
  ];
  return html`<div class="token-panel" aria-live="polite">
    <code class="chosen-text">${JSON.stringify(token.text)}</code>
    ${facts.map(([name, value]) => html`<span class="fact"><span class="quiet">${name}</span> ${value}</span>`)}
  </div>`;
}

function Tokens({ rollout }) {
  const size = rollout.mask.length;
  const details = useMemo(() => tokenDetails(rollout), [rollout]);
  const chunkOf = (i) => Math.floor(i / CHUNK) * CHUNK;
  const asked = useMemo(readQuery, []);
  const [chosen, setChosen] = useState(() => (/^\d+$/.test(asked.token) && Number(asked.token) <= size ? Number(asked.token) - 1 : -1));
  const list = useRef(null);
  const chunks = useNear(list, [rollout], CHUNKS_MARGIN, Math.max(0, chunkOf(chosen)));
  const choices = Object.keys(COLOURINGS).filter((name) => !COLOURINGS[name].needs || rollout[COLOURINGS[name].needs]);
  const [colouring, setColouring] = useState(choices.includes(asked.colour) ? asked.colour : "log-prob");
  const scale = useMemo(() => scaleOf(colouring, rollout, details), [colouring, details]);
  useEffect(() => {
    if (chosen < 0 && colouring === "log-prob" && !location.hash.includes("?")) return undefined;
    // Not for every key of many: a browser takes only so many changes of the address.
    const timer = setTimeout(() => writeQuery({ colour: colouring, token: chosen < 0 ? "" : chosen + 1 }), ADDRESS_AFTER_MS);
    return () => clearTimeout(timer);
  }, [chosen, colouring]);

  useEffect(() => {
    document.querySelector(".token.chosen")?.classList.remove("chosen");
    if (chosen < 0) return;
    const element = document.getElementById(`t${chosen}`);
    if (!element) {
      chunks.add(chunkOf(chosen));
      list.current.querySelector(`[data-chunk="${chunkOf(chosen)}"]`)?.scrollIntoView({ block: "center" });
      return;
    }
    element.classList.add("chosen");
    element.scrollIntoView({ block: "nearest" });
  }, [chosen, chunks.near]);

  // Keys may repeat faster than the page is drawn, so each one starts from where the one before it went.
  const go = (from) => setChosen((old) => Math.min(size - 1, Math.max(0, from(old))));
  const starts = rollout.turns.map((turn) => turn.start);
  useKeys({
    ArrowRight: () => go((old) => old + 1),
    ArrowLeft: () => go((old) => old - 1),
    ArrowDown: () => go((old) => starts.find((start) => start > old) ?? old),
    ArrowUp: () => go((old) => starts.findLast((start) => start < old) ?? old),
    Home: () => go(() => 0),
    End: () => go(() => size - 1),
    Escape: () => setChosen(-1),
  });

  const drawn = [];
  for (let start = 0; start < size; start += CHUNK) {
    const end = Math.min(size, start + CHUNK);
    drawn.push(
      html`<${Chunk}
        key=${start}
        rollout=${rollout}
        start=${start}
        end=${end}
        details=${details}
        colouring=${scale}
        mounted=${chunks.has(start)}
        height=${chunks.height(start, (end - start) * 1.2)}
      />`,
    );
  }
  return html`<div class="tokens-view">
    <${TokenPanel} token=${chosen < 0 ? null : details(chosen)} i=${chosen} size=${size} />
    <p class="legend">
      ${choices.length > 1 && html`<${Choice} label="colour by" options=${choices} value=${colouring} onChange=${setColouring} />`}
      <span class="scale">${scale.called}: ${scale.says.map((words, i) => html`<span class=${`token ${scale.shades[i]}`}>${words}</span>`)}</span>
      ${!COLOURINGS[colouring].bounds && html`<span class="quiet">half of this rollout's sampled tokens have the first colour, 3 of 100 the last</span>`}
      <span class="token">not sampled</span>
      ${rollout.clipped && html`<span class="token s0 clipped">clipped</span>`}
    </p>
    <div class="tokens" ref=${list} tabindex="0" role="group" aria-label="tokens: left and right choose one" onClick=${(event) => event.target.dataset.i && setChosen(Number(event.target.dataset.i))}>
      ${drawn}
    </div>
  </div>`;
}
