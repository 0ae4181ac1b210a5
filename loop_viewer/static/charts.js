// Curves by iteration: those of a run, and one quantity of several runs.
"use strict";

/** The charts of a run: a metric -> its name in the legend. Dev scores stand at the iteration whose policy they score. */
const CURVES = [
  { title: "reward and success (0 to 1)", keys: { reward: "reward", success: "success", dev_reward: "dev reward", dev_success: "dev success" }, from: [0, 1] },
  { title: "loss (mean of the steps)", keys: { loss: "loss", held_out_loss: "held-out loss" }, small: true },
  { title: "norm of the gradient", keys: { grad_norm: "gradient norm, mean of the steps", grad_norm_max: "the largest" }, zero: true },
  { title: "entropy (nats)", keys: { entropy: "entropy, exact, of kept tokens", entropy_estimate: "entropy, estimate, of sampled tokens" } },
  { title: "KL (nats)", keys: { approx_kl: "KL to the sampling policy", reference_kl: "KL to the base model" }, small: true },
  { title: "sampler against learner (nats)", keys: { gap_p99: "gap, 99th percentile" }, small: true },
  { title: "share of tokens (0 to 1)", keys: { clip_fraction: "ratios clipped" }, small: true, zero: true },
  { title: "share of rollouts (0 to 1)", keys: { kept_fraction: "rollouts kept" }, from: [0, 1] },
  { title: "groups without signal", keys: { groups_without_signal: "groups without signal", groups: "all groups" }, zero: true },
  { title: "a rollout's turns", keys: { turns: "turns" }, zero: true },
  { title: "a rollout's sampled tokens", keys: { sampled_tokens: "sampled tokens" }, zero: true },
  { title: "time of an iteration (s)", keys: { seconds_waiting: "waiting for rollouts", seconds_recomputing: "recomputing log-probs", seconds_updating: "updating", seconds_publishing: "publishing" }, zero: true },
];
const CURVE_HEIGHT = 200;
const FOLDER_CURVE_HEIGHT = 320;
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f"];
const DASHES = [[], [6, 4], [2, 3]];
const colourOf = (place) => COLOURS[place % COLOURS.length];
const dashOf = (place) => DASHES[Math.floor(place / COLOURS.length) % DASHES.length];
/** Points and legend squares are filled, those of a dashed line hollow. */
const fillOf = (place) => (dashOf(place).length ? "transparent" : colourOf(place));
/** True for a metric of some iterations only; any other gap is an iteration without it. */
const hasGaps = (key) => key.startsWith("dev_");

/** The least span of a scale: a smaller one shows rounding, which would look like a rise or a fall. */
const LEAST_SPAN = 1e-6;
const spanOf = (plot, low, high) => (high - low < LEAST_SPAN && low <= LEAST_SPAN && high >= -LEAST_SPAN ? [Math.min(0, low), Math.max(LEAST_SPAN, high)] : uPlot.rangeNum(low, high, 0.1, true));

/** Ticks with so many digits that no two of them read alike. */
function exponents(plot, ticks) {
  const written = [1, 2, 3].map((digits) => ticks.map((tick) => (tick ? tick.toExponential(digits) : "0")));
  return written.find((texts) => new Set(texts).size === texts.length) ?? written[2];
}

const clamp = (value, [low, high] = [-Infinity, Infinity]) => Math.min(high, Math.max(low, value));

/** The value of a metric by iteration: {iteration: number}. */
function valuesOf(metrics, key) {
  const found = new Map();
  for (const line of metrics) {
    for (const early of key.startsWith("dev_") ? ["earlier_", ""] : [""]) {
      const at = key.startsWith("dev_") ? line[`${early}dev_iteration`] : line.iteration;
      if (typeof line[early + key] === "number") found.set(at, line[early + key]);
    }
  }
  return found;
}

/** A curve in words, for readers who do not see it. */
function inWords({ label, values }) {
  const all = [...values];
  const ends = [all[0], all.at(-1)].map(([iteration, value]) => `${value.toPrecision(3)} at iteration ${iteration}`);
  return `${label} from ${ends.join(" to ")}`;
}

/** The mean of several runs' values at the iterations that all of them have, and the band from lowest to highest. */
function meanOf(all) {
  const shared = [...all[0].keys()].filter((iteration) => all.every((values) => values.has(iteration)));
  const by = (combine) => new Map(shared.map((iteration) => [iteration, combine(all.map((values) => values.get(iteration)))]));
  return { values: by((each) => each.reduce((a, b) => a + b) / each.length), low: by((each) => Math.min(...each)), high: by((each) => Math.max(...each)) };
}

/** Fill the band of each of `series` that has one. */
function drawBands(plot, series) {
  for (const { low, high, place } of series.filter((each) => each.low)) {
    plot.ctx.save();
    plot.ctx.globalAlpha = 0.18;
    plot.ctx.fillStyle = colourOf(place);
    plot.ctx.beginPath();
    for (const [x, y] of [...low, ...[...high].reverse()]) plot.ctx.lineTo(plot.valToPos(x, "x", true), plot.valToPos(y, "y", true));
    plot.ctx.fill();
    plot.ctx.restore();
  }
}

/** Lines by iteration. Each of `series` is {label, values: {iteration: number}, low, high, gaps, place}; `gaps`: a line crosses
 * an iteration that it has no number for; `low` and `high` are the edges of a band around it. `zero`: the scale begins at 0.
 * `stamp` changes when the series do; `open` is called with an iteration that was clicked. */
function Chart({ title, series, from, small, zero, stamp, open, height = CURVE_HEIGHT }) {
  const holder = useRef(null);
  useEffect(() => {
    const iterations = series.flatMap(({ values }) => [...values.keys()]);
    if (!iterations.length) return undefined;
    const first = iterations.reduce((a, b) => Math.min(a, b));
    const last = iterations.reduce((a, b) => Math.max(a, b));
    const places = [...Array(last - first + 1).keys()].map((i) => first + i);
    const edges = [...(zero ? [0] : []), ...series.flatMap(({ low = [], high = [] }) => [...low, ...high].map(([, value]) => value))];
    const ink = getComputedStyle(document.body).color;
    const axis = { stroke: ink, grid: { stroke: "rgba(128,128,128,0.25)" }, ticks: { show: false } };
    const options = {
      title,
      width: holder.current.clientWidth || 300,
      height,
      scales: { x: { time: false }, y: { range: from ?? ((plot, low, high) => spanOf(plot, Math.min(low, ...edges), Math.max(high, ...edges))) } },
      legend: { markers: { fill: (plot, i) => plot.series[i].points.fill(plot, i) } },
      hooks: { drawAxes: [(plot) => drawBands(plot, series)] },
      axes: [{ ...axis, label: "iteration", labelSize: 16, labelFont: "11px system-ui", size: 26, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500] }, { ...axis, size: 56, ...(small ? { values: exponents } : {}) }],
      series: [
        { label: "iteration", value: (plot, value) => value ?? "–" },
        ...series.map(({ label, gaps, place }, i) => ({
          label,
          stroke: colourOf(place ?? i),
          dash: dashOf(place ?? i),
          points: { fill: fillOf(place ?? i) },
          width: 2,
          spanGaps: gaps,
          value: (plot, value) => (value === null || value === undefined ? "–" : value.toPrecision(3)),
        })),
      ],
    };
    const data = [places, ...series.map(({ values }) => places.map((place) => values.get(place) ?? null))];
    const plot = new uPlot(options, data, holder.current);
    if (open) {
      plot.over.title = "a click opens the iteration";
      plot.over.style.cursor = "pointer";
      plot.over.addEventListener("click", () => typeof plot.cursor.idx === "number" && open(places[plot.cursor.idx]));
    }
    const observer = new ResizeObserver(() => plot.setSize({ width: holder.current.clientWidth, height }));
    observer.observe(holder.current);
    return () => {
      observer.disconnect();
      plot.destroy();
    };
  }, [stamp]);
  const drawn = series.filter(({ values }) => values.size);
  return drawn.length > 0 && html`<figure class="curve"><figcaption class="hidden">${title}: ${drawn.map(inWords).join("; ")}</figcaption><div ref=${holder}></div></figure>`;
}

/** Standard errors to either side that make an interval of 95 %. */
const CERTAIN = 1.96;

/** A chart of a run. A quantity with a standard error, over tasks, has a band of 95 %. */
function Curve({ keys, metrics, ...chart }) {
  const known = Object.entries(keys).map(([key, label]) => ({ key, label, values: valuesOf(metrics, key), gaps: hasGaps(key) })).filter(({ values }) => values.size);
  const series = known.map(({ key, label, ...each }, place) => {
    const errors = [...valuesOf(metrics, `${key}_error`)].filter(([iteration]) => each.values.has(iteration));
    const edge = (sign) => new Map(errors.map(([iteration, error]) => [iteration, clamp(each.values.get(iteration) + sign * CERTAIN * error, chart.from)]));
    return { ...each, place, label: errors.length ? `${label}, 95% over tasks` : label, ...(errors.length && { low: edge(-1), high: edge(1) }) };
  });
  return html`<${Chart} ...${chart} series=${series} stamp=${metrics} />`;
}
