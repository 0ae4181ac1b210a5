// A rollout as a conversation: thoughts, code and output set apart.
"use strict";

const OPENING = /```(?:python|py)(?:[ \t]*(?:\r?\n|$)|[ \t]+([^\s`][^\r\n]*?)```)/;
const TOOL_CALL = /<tool_call>([\s\S]*?)(?:<\/tool_call>|$)/;
const CLOSING = /^[ \t]*```|```[ \t]*$/m;
const REMINDER = "\nAs a reminder\n\n";
const FIRST_CHARACTERS = 6000;
const MORE_CHARACTERS = 200000;

/** An assistant message: [{code: bool, text, tool}]; a tool call is code, `tool` its name, where it can be read. */
function segments(text) {
  const parts = text.split(TOOL_CALL);
  return parts.flatMap((part, place) => (place % 2 ? [toolCall(part)] : blocks(part)));
}

function toolCall(text) {
  try {
    const call = JSON.parse(text);
    if (typeof call.name === "string") {
      return { code: true, tool: `calls ${call.name}`, text: JSON.stringify(call.arguments ?? {}, null, 2) };
    }
  } catch {
    // cut off, or no JSON
  }
  return { code: true, tool: "a call that cannot be read", text };
}

/** The adapter's own reading of an assistant message: [{code: bool, text}], a last block without its fence included. */
function blocks(text) {
  const parts = [];
  let rest = text;
  for (;;) {
    const opening = OPENING.exec(rest);
    if (!opening) break;
    parts.push({ code: false, text: rest.slice(0, opening.index) });
    rest = rest.slice(opening.index + opening[0].length);
    if (opening[1] !== undefined) {
      parts.push({ code: true, text: opening[1] }); // a block on one line
      continue;
    }
    const closing = CLOSING.exec(rest);
    parts.push({ code: true, text: closing ? rest.slice(0, closing.index) : rest });
    rest = closing ? rest.slice(closing.index + closing[0].length) : "";
    if (!closing) break;
  }
  parts.push({ code: false, text: rest });
  return parts.filter((part) => part.text.trim());
}

// Control characters and those that turn the direction of text: shown by their number, so that nothing hides behind them.
const CONTROLS = /([\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff])/g;
const controlName = (text) => `‹U+${text.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}›`;

function withControls(text) {
  const parts = text.split(CONTROLS);
  if (parts.length === 1) return text;
  return parts.map((part, place) => (place % 2 ? html`<span class="control">${controlName(part)}</span>` : part));
}

/** Text of any length: the beginning at once, the rest on request. */
function LongText({ text, className }) {
  const [asked, setShown] = useState(FIRST_CHARACTERS);
  const shown = usePrinting() ? text.length : asked;
  const left = text.length - shown;
  return html`<pre class=${`text ${className || ""}`} tabindex=${className === "output" ? 0 : undefined}>${withControls(text.slice(0, shown))}</pre>
    ${left > 0 &&
    html`<button class="more" onClick=${() => setShown(shown + MORE_CHARACTERS)}>
      show ${Math.min(left, MORE_CHARACTERS).toLocaleString()} of ${left.toLocaleString()} more characters
    </button>`}`;
}

/** The world's answer, without the task that it repeats after every turn. */
function withoutReminder(text) {
  const cut = text.lastIndexOf(REMINDER);
  return cut < 0 ? text : text.slice(0, cut);
}

function Observation({ text, ofFailed }) {
  const output = withoutReminder(text);
  const failed = ofFailed || /^(Execution failed\.|Error:|Traceback \(most recent call last\):)/.test(text);
  return html`<div class=${`message user ${failed ? "failed" : ""}`}>
    <div class="role">${failed ? "output: failed" : "output"}</div>
    ${output ? html`<${LongText} text=${output} className="output" />` : html`<p class="quiet">(an empty message)</p>`}
    ${output !== text && html`<details><summary>reminder</summary><${LongText} text=${text.slice(output.length + 1)} /></details>`}
  </div>`;
}

const BRANCH_POLL_MS = 1000;
/** True if the run's node answered for its folder at the last request for the run. */
let nodeRuns = false;

/** Asks the node of a live run for another continuation from a turn on, and shows it when it is there. */
function GoOn({ rollout, turn }) {
  const [state, setState] = useState("");
  const asking = state === "asking";
  const ask = async () => {
    setState("asking");
    try {
      const { collection } = await api.branch(rollout.collection, rollout.cursor, turn);
      for (;;) {
        if ((await api.branchState(collection)).ended) break;
        await new Promise((resolve) => setTimeout(resolve, BRANCH_POLL_MS));
      }
      location.hash = link("c", collection, "r", 1);
    } catch (error) {
      setState(error.message);
    }
  };
  return html`<button class="go-on" disabled=${asking} onClick=${ask}>${asking ? "going on …" : "go on from here"}</button>
    ${state && !asking && html`<span class="error"><bdi>${state}</bdi></span>`}`;
}

/** The value of the state before a turn: the mean return of the continuations that began there. */
function TurnValue({ value, next }) {
  if (!value || value.value === null) return null;
  const error = value.stderr === null ? "" : ` ± ${value.stderr.toFixed(2)}`;
  const after = next === null || next === undefined ? "" : ` · this turn ${signed(next - value.value)}`;
  const title = `${value.n} continuations by policy version ${value.policy_version}, ${value.refused} refused`;
  return html`<span class="turn-value" title=${title}>
    <meter min="0" max="1" value=${value.value}></meter> value ${value.value.toFixed(2)}${error}${after}
  </span>`;
}

const turnSeconds = (turn) => `${fixed(turn.sampling_seconds, 1)} s to sample, ${fixed(turn.environment_seconds, 1)} s in the world`;

/** No id: on a task's page every rollout has a turn of the same number. */
const scrollToTurn = (number) => document.querySelector(`[data-turn="${CSS.escape(number)}"]`)?.scrollIntoView();

/** A cell for each turn, as wide as its seconds: red where it failed, amber where it was cut; a click goes there. */
function TurnStrip({ rollout }) {
  const before = turnsBefore(rollout);
  useEffect(() => {
    const { turn } = readQuery();
    if (turn) scrollToTurn(turn);
  }, [rollout]);
  // Where most turns are cut, the colour would say nothing.
  const isCut = (turn) => turn.finish_reason === "length";
  const rare = rollout.turns.filter(isCut).length <= Math.max(1, rollout.turns.length / 2);
  return html`<div class="quiet">turns, as wide as their seconds${rollout.turns.some((turn) => turn.failed) && "; red: failed"}</div>
    <div class="strip" role="group" aria-label="turns by seconds">${rollout.turns.map((turn, place) => {
    const state = turn.failed ? "red" : isCut(turn) && rare ? "amber" : "";
    const title = `turn ${before + place + 1}${turn.failed ? ", failed" : ""}${isCut(turn) ? ", cut off" : ""}: ${turnSeconds(turn)}`;
    const goTo = () => {
      writeQuery({ turn: before + place + 1 });
      scrollToTurn(before + place + 1);
    };
    return html`<button class=${state} style=${{ flexGrow: turn.sampling_seconds + turn.environment_seconds }}
      title=${title} aria-label=${title} onClick=${goTo}>${before + place + 1}</button>`;
  })}</div>`;
}

/** `turn` is null where another rollout sampled it; `place` is its place among the turns of this one. */
function Action({ text, reasoning, number, turn, place, rollout }) {
  const origin = rollout.branch_of ? `of ${rollout.branch_of.rollout_id}` : "";
  const thinking = turn?.thinking_tokens ? ` (${turn.thinking_tokens} thinking${turn.cut_in_thinking ? ", cut off there" : ""})` : "";
  const note = turn ? `turn ${number} ·${turn.summary ? " summary of the history ·" : ""} ${turn.end - turn.start} tokens${thinking} · ${turnSeconds(turn)} · ${policyFact(rollout, turn.policy_version).join(" ")}${turn.reward === null || turn.reward === undefined ? "" : ` · reward ${turn.reward}`}` : `turn ${number} ${origin}`;
  const cut = turn?.finish_reason === "length";
  const { values } = rollout;
  const after = values && (place + 1 < values.length ? values[place + 1]?.value : rollout.reward);
  return html`<div class=${`message assistant ${turn ? "" : "replayed"} ${cut ? "cut" : ""}`} data-turn=${number}>
    <div class="role">agent <bdi class="quiet">${note}</bdi>${cut && html` <span class="error">cut off by the limit of tokens</span>`}
      ${turn && values && html` <${TurnValue} value=${values[place]} next=${after} />`}
      ${turn && nodeRuns && rollout.mask.length > 0 && rollout.segments === 1 && html` <${GoOn} rollout=${rollout} turn=${number - 1} />`}
    </div>
    ${reasoning && html`<details><summary>thinking</summary><${LongText} text=${reasoning} /></details>`}
    ${segments(text).map(
      (part) => html`${part.tool && html`<div class="role">${withControls(part.tool)}</div>`}
        <${LongText} text=${part.text.trim()} className=${part.code ? "code" : ""} />`,
    )}
    ${!text.trim() && html`<p class="quiet">(an empty message)</p>`}
  </div>`;
}

/** An assistant's message that the policy did not speak. */
function Inserted({ text }) {
  return html`<div class="message assistant replayed">
    <div class="role">agent <span class="quiet">in the prompt: not sampled by the policy</span></div>
    <${LongText} text=${text.trim()} />
  </div>`;
}

/** The lines of `text`, those marked that `other` lacks. */
function Marked({ text, other }) {
  if (text === undefined) return html`<p class="quiet">(no such turn)</p>`;
  const known = new Set((other ?? "").split("\n"));
  const lines = text.slice(0, FIRST_CHARACTERS).split("\n");
  return html`<pre class="text">${lines.map((line) => html`<span class=${known.has(line) ? "" : "differs"}>${withControls(line)}${"\n"}</span>`)}</pre>
    ${text.length > FIRST_CHARACTERS && html`<p class="quiet">and ${(text.length - FIRST_CHARACTERS).toLocaleString()} more characters</p>`}`;
}

/** The action and the observation of each turn of a rollout's own. */
const stepsOf = ({ messages, turns }) =>
  turns.map(({ message }) => ({ action: messages[message]?.content, output: messages[message + 1] && withoutReminder(messages[message + 1].content).trimEnd() }));

/** Rows of places in two lists of turns: turns of one text stand beside each other, what is between them in order. */
function aligned(a, b) {
  const same = (i, j) => i < a.length && j < b.length && a[i].action === b[j].action;
  const left = [...Array(a.length + 2)].map(() => new Uint32Array(b.length + 2)); // how many can still be matched
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) left[i][j] = same(i, j) ? left[i + 1][j + 1] + 1 : Math.max(left[i + 1][j], left[i][j + 1]);
  }
  const rows = [];
  let between = [[], []];
  const close = () => {
    for (let k = 0; k < Math.max(between[0].length, between[1].length); k++) rows.push([between[0][k], between[1][k]]);
    between = [[], []];
  };
  for (let i = 0, j = 0; i < a.length || j < b.length; ) {
    if (same(i, j)) {
      close();
      rows.push([i++, j++]);
    } else if (j === b.length || (i < a.length && left[i + 1][j] >= left[i][j + 1])) between[0].push(i++);
    else between[1].push(j++);
  }
  close();
  return rows;
}

/** Two rollouts turn by turn, with the lines marked in which they differ. */
function BesidePage({ collection, cursor, other, run }) {
  const nameOf = (id) => run.collections.find((item) => item.id === id)?.name ?? id;
  const loaded = useLoaded(
    () =>
      Promise.all([{ collection, cursor }, other].map(async (each) => {
        const { advantage } = (await api.summaries(each.collection)).find(({ cursors }) => cursors.includes(each.cursor)) ?? {};
        return { ...(await api.rollout(each.collection, each.cursor)), advantage };
      })),
    [collection, cursor, other.collection, other.cursor],
  );
  useKeys({ u: () => (location.hash = link("c", collection, "r", cursor)), j: () => moveFocus(1), k: () => moveFocus(-1) });
  if (loaded.error) return html`<p class="error">${loaded.error}</p>`;
  if (!loaded.value) return html`<p class="quiet">reading the rollouts …</p>`;
  const steps = loaded.value.map(stepsOf);
  const [first] = loaded.value;
  return html`<section>
    <${Opening} folded=${[]} task=${first.messages[openingOf(first) - 1]} />
    <p class="quiet">yellow: lines that the other's turn lacks; grey: turns that are the same in both</p>
    <div class="beside">${loaded.value.map((each) => html`<h2><a class="stop" href=${link("c", each.collection, "r", each.cursor)}><bdi>${each.task_id} / ${each.index}</bdi></a>${" "}
      <span class="quiet"><bdi>${nameOf(each.collection)}</bdi>, reward ${fixed(each.reward)}${advantageOf(each, ", advantage ")}, ${each.turns.length} turns, ${each.end_reason}</span></h2>`)}
    ${loaded.value.map(({ requirements }) => html`<${Requirements} requirements=${requirements} />`)}
    ${aligned(...steps).flatMap((places) => [0, 1].map((side) => {
      const [own, its] = [steps[side][places[side]], steps[1 - side][places[1 - side]]];
      return html`<div class=${`turn ${own && its && own.action === its.action && own.output === its.output ? "same" : ""}`}>
        <div class="role">rollout ${loaded.value[side].index}${own && `, turn ${places[side] + 1}`}</div>
        <${Marked} text=${own?.action} other=${its?.action} />
        ${own?.output && html`<div class="output"><${Marked} text=${own.output} other=${its?.output} /></div>`}
      </div>`;
    }))}
    </div>
  </section>`;
}

/** The sequences of an episode as one conversation: messages that one shares with an earlier one stand there only, and
 * those that it begins with and that stand `above` it are left out. */
function Thread({ rollout, above = [] }) {
  const { thread, collection } = rollout;
  const others = useLoaded(
    () => Promise.all(thread.map(({ cursor }) => api.rollout(collection, cursor))),
    [collection, thread.map(({ cursor }) => cursor).join()],
  );
  const begun = above.every(({ content }, place) => rollout.messages[place]?.content === content) ? above.length : 0;
  if (thread.length < 2) return html`<${Conversation} rollout=${rollout} shared=${begun} />`;
  if (others.error) return html`<p class="error">${others.error}</p>`;
  if (!others.value) return html`<p class="quiet">reading the other sequences …</p>`;
  const known = (place) => new Set(others.value.slice(0, place).flatMap(({ messages }) => messages.map(({ content }) => content)));
  return others.value.map(
    (each, place) => html`${place > 0 && html`<h2 class="sequence">sequence ${place + 1} begins here: ${thread[place].begins}</h2>`}
      <${Conversation} rollout=${each} shared=${place ? thread[place].shared : begun} earlier=${thread[place].turns} known=${known(place)} />`,
  );
}

/** The messages before a sequence's first turn: the last of them as what is asked, the others folded. */
function Opening({ folded, task, segment = 0 }) {
  const summary = segment ? `${folded.length} more messages before its first turn` : `prompt: ${folded.length} message${folded.length === 1 ? "" : "s"} before the task`;
  return html`${folded.length > 0 && html`<${Folded} summary=${summary} messages=${folded} />`}
    ${task && html`<div class="message task"><div class="role">${segment ? task.role : "task"}</div><${LongText} text=${task.content} /></div>`}`;
}

function Folded({ summary, messages }) {
  return html`<details class="prompt">
    <summary>${summary}</summary>
    ${messages.map(
      (message) => html`<div class="message">
        <div class="role">${message.role}</div>
        <${LongText} text=${message.content} />
      </div>`,
    )}
  </details>`;
}

/** The places of a rollout's messages that another rollout sampled. */
function replayedOf(rollout) {
  if (rollout.segment || !rollout.turns.length) return [];
  const earlier = [...rollout.messages.keys()].filter((place) => rollout.messages[place].role === "assistant" && place < rollout.turns[0].message);
  return earlier.slice(-turnsBefore(rollout) || Infinity);
}

/** How many messages stand before the first turn of a rollout. */
const openingOf = (rollout) => replayedOf(rollout)[0] ?? rollout.turns[0]?.message ?? rollout.messages.length;

/** `rollout` with its messages; what its first turn follows on is folded away. In a thread, the first `shared` messages
 * are left out, `earlier` turns were before its own, and `known` are the texts of the sequences before. */
function Conversation({ rollout, shared = 0, earlier = 0, known = new Set() }) {
  const { messages, turns } = rollout;
  const before = turnsBefore(rollout);
  const places = turns.map(({ message }) => message);
  const replayed = replayedOf(rollout);
  const first = openingOf(rollout);
  const last = messages[first - 1];
  const task = last && shared < first && !known.has(last.content) ? last : null;
  const requests = new Set(turns.map((turn, i) => (turn.summary ? places[i] - 1 : -1)));
  const folded = messages.slice(shared, task ? first - 1 : first);
  return html`<div class="conversation">
    <${Opening} folded=${folded} task=${task} segment=${rollout.segment} />
    ${messages.slice(first).map((message, i) => {
      if (requests.has(first + i)) return html`<div class="message"><div class="role">request of the node</div><${LongText} text=${message.content} /></div>`;
      if (!message.content && message.role !== "assistant" && first + i === messages.length - 1) return null; // the end below says why
      if (message.role !== "assistant") return html`<${Observation} text=${message.content} ofFailed=${Boolean(turns[places.indexOf(first + i - 1)]?.failed)} />`;
      const own = places.indexOf(first + i);
      const place = own < 0 ? replayed.indexOf(first + i) - before : own;
      if (own < 0 && place < -before) return html`<${Inserted} text=${message.content} />`;
      return html`<${Action} text=${message.content} reasoning=${message.reasoning} number=${before + earlier + place + 1} turn=${turns[place]} place=${place} rollout=${rollout} />`;
    })}
    ${rollout.segment + 1 === rollout.segments && html`<p class="message quiet">the episode ended: ${rollout.end_reason}, reward ${fixed(rollout.reward)}</p>`}
  </div>`;
}

function Requirements({ requirements }) {
  return html`<ul class="requirements">
    ${requirements.map(
      (item) => html`<li class=${item.passed ? "passed" : "missed"}>
        <span class="mark">${item.passed ? "✓" : "✗"}</span> <bdi>${item.text}</bdi>
        ${item.no_op_pass && html`<span class="quiet"> (doing nothing passes it)</span>`}
      </li>`,
    )}
  </ul>`;
}
