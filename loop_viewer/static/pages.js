// The four pages: the run, a collection, the rollouts of one task side by side, one rollout.
"use strict";

/** Failed attempts of the given tasks, each {reason: count}. */
const countFailures = (tasks) => tasks.flatMap(Object.values).reduce((sum, count) => sum + count, 0);

/** A line per task with failed attempts: how many, and why. */
const attemptsByTask = (failures) =>
  Object.entries(failures)
    .map(([task, reasons]) => `${task}: ${Object.entries(reasons).map(([reason, count]) => `${reason} ${count}`).join(", ")}`)
    .join("\n");

const NAMED_LINES = 5;
/** The lines that cannot be read and are left out. */
function Damage({ damage = [] }) {
  const more = damage.length - NAMED_LINES;
  return html`${damage.slice(0, NAMED_LINES).map((line) => html`<p class="error">left out: <bdi>${line}</bdi></p>`)}
    ${more > 0 && html`<p class="error">and ${more} more lines</p>`}`;
}

const duration = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`);

/** Facts, each a name and a value; those without a value are left out. */
function Facts({ facts, id }) {
  return html`<p class="facts" id=${id}>${Object.entries(facts).filter(([, value]) => (value ?? "") !== "").map(
    ([name, value]) => html`<span class="fact"><span class="quiet">${name}</span> <bdi>${value}</bdi></span>`,
  )}</p>`;
}

/** The model, the algorithm, the state and the settings of a run. */
function Head({ run: { head, settings, starts, metrics } }) {
  const took = metrics.reduce((sum, { seconds }) => sum + (seconds ?? 0), 0);
  return html`<${Facts} id="head" facts=${{
    model: head.model,
    algorithm: head.algorithm,
    tasks: head.dataset,
    state: head.state,
    "time left": head.seconds_left === null ? "" : duration(head.seconds_left),
    started: starts.started?.replace("T", " ").replace("+00:00", " UTC"),
    iterations: metrics.at(-1)?.iteration,
    "training took": took ? duration(took) : "",
    ...settings,
  }} />`;
}

/** How a run was started, folded away. */
function Starts({ starts: { config, started, ...facts } }) {
  return config !== undefined && html`<details id="starts"><summary>command, commit, versions and config</summary>
    <${Facts} facts=${facts} /><pre class="output">${config}</pre></details>`;
}

const points = ({ mean, low, high }, sign = "") =>
  `${sign && mean > 0 ? sign : ""}${fixed(mean, 1)}${low === null ? "" : ` [${fixed(low, 1)}, ${fixed(high, 1)}]`}`;

/** The scores of a run's evaluation, each with its change from other policies. */
function Result({ result: { split, tasks, scores = [], comparisons } }) {
  const changes = ({ policy, sampling }) => comparisons.filter(({ second, sampling: of }) => second === policy && of === sampling);
  return scores.length > 0 && html`<div id="result"><h2>Result${split && ` on ${tasks} tasks of ${split}`}</h2>
    <table class="wide">
      <thead><tr><th>policy</th><th>sampling</th><th>success, % [95%]</th><th>reward</th><th>change in percentage points [95%], tasks gained and lost</th></tr></thead>
      <tbody>${scores.map((score) => html`<tr><td><bdi>${score.policy}</bdi></td><td>${score.sampling}</td><td>${points(score)}</td><td>${fixed(score.reward)}</td>
        <td>${changes(score).map((each) => html`<div>${points(each, "+")}: ${each.gained} gained, ${each.lost} lost against <bdi>${each.first}</bdi></div>`)}</td></tr>`)}</tbody>
    </table></div>`;
}

/** A function that ticks one of a list, or takes its tick away; `open` is called with the first two that are ticked. */
function usePair(open) {
  const ticked = useRef([]);
  return (one, on) => {
    ticked.current = ticked.current.filter((each) => each.join() !== one.join()).concat(on ? [one] : []);
    if (ticked.current.length === 2) open(...ticked.current.flat());
  };
}

/** The lists of the run's page, and which kinds of collections stand in them. */
const SCORED = "Evaluations";
const LISTS = { Iterations: ["training"], [SCORED]: ["dev", "evaluation"], Continuations: ["continuation"] };

function RunPage({ run }) {
  const { metrics, collections } = run;
  useKeys({ j: () => moveFocus(1), k: () => moveFocus(-1), ...(run.folder ? { u: () => location.assign(TO_FOLDER) } : {}) });
  const lines = new Map(metrics.map((line) => [line.iteration, line]));
  const figures = (item) => (item.whole && lines.get(item.iteration)) || item.totals;
  const tick = usePair((...ids) => (location.hash = link("against", ...ids)));
  const open = (iteration) => {
    const item = collections.find((each) => each.kind === "training" && each.iteration === iteration);
    if (item) location.hash = link("c", item.id);
  };
  return html`<section>
    <${Head} run=${run} />
    <${Starts} starts=${run.starts} />
    <${Result} result=${run.result} />
    <${Damage} damage=${run.damage} />
    ${metrics.length > 0 &&
    html`<div class="curves">${CURVES.map((curve) => html`<${Curve} ...${curve} metrics=${metrics} open=${open} />`)}</div>`}
    ${collections.length > 0 && html`<${SearchAll} collections=${collections} />`}
    <div class="lists">${Object.entries(LISTS).map(([title, kinds]) => {
      const items = collections.filter(({ kind }) => kinds.includes(kind));
      return items.length > 0 && html`<div key=${title}><h2>${title}</h2>
        ${title === SCORED && items.length > 1 && html`<p class="quiet">Tick two to see the tasks gained and lost.</p>`}
        <${CollectionTable} items=${items} figures=${figures} tick=${title === SCORED && items.length > 1 && tick} /></div>`;
    })}</div>
    ${collections.length === 0 && html`<p class="quiet">no rollouts yet</p>`}
  </section>`;
}

function CollectionTable({ items, figures, tick }) {
  return html`<table class="wide">
    <thead><tr><th>collection</th><th>reward</th><th>success</th><th>rollouts</th><th>failed attempts</th><th>size</th></tr></thead>
    <tbody>
      ${items.map((item) => {
        const line = figures(item);
        const count = line ? line.rollouts : "–";
        return html`<tr key=${item.id}>
          <td>${tick && html`<input type="checkbox" aria-label=${`compare ${item.name}`} onChange=${(event) => tick([item.id], event.target.checked)} /> `}
            <a class="stop" href=${link("c", item.id)} title=${item.id}><bdi>${item.name}</bdi></a>${
            item.damage.length > 0 && html` <span class="error" title=${item.damage[0]}>${item.damage.length} damaged lines left out</span>`}</td>
          <td>${fixed(line && line.reward)}</td>
          <td>${line ? percent(line.success) : "–"}</td>
          <td>${count}${!item.ended && item.wanted > 0 && html`<span class="quiet"> of ${item.wanted}, not ended</span>`}</td>
          <td title=${attemptsByTask(item.failures)}>${countFailures(Object.values(item.failures))}</td>
          <td class="quiet">${(item.bytes / 1e6).toFixed(1)} MB</td>
        </tr>`;
      })}
    </tbody>
  </table>`;
}

const FILTERS = {
  all: () => true,
  failed: (entry) => !entry.success,
  solved: (entry) => entry.success,
  "over budget": (entry) => entry.end_reason !== "completed",
  "with errors": (entry) => entry.failed_turns > 0,
  ungradable: (entry) => Boolean(entry.ungradable),
  "with a note": (entry) => Boolean(entry.note),
};
/** Columns of the list of tasks, and of that of rollouts: what a row says, and how it is written. */
const TASK_COLUMNS = {
  task: { of: ({ task }) => task },
  "mean reward": { of: ({ mean }) => mean, number: fixed },
  "failed attempts": { of: ({ failed }) => failed, number: String, further: "attempts" },
};
const ROLLOUT_COLUMNS = {
  rollout: { of: ({ task, index }) => `${task} / ${index}` },
  reward: { of: ({ reward }) => reward, number: fixed },
  advantage: { of: ({ advantage }) => advantage, number: signed },
  turns: { of: ({ turns }) => turns, number: String },
  tokens: { of: ({ tokens }) => tokens, number: (value) => value.toLocaleString() },
  gap: { of: ({ gap }) => gap, number: (value) => value.toExponential(1) },
  "log-prob": { of: ({ mean_logprob: value }) => value, number: fixed },
  end: { of: ({ end_reason: value }) => value },
  asks: { of: ({ asks }) => asks, further: "asks" },
};

function Choice({ label, options, value, onChange }) {
  return html`<label>${label}${" "}
    <select value=${value} onChange=${(event) => onChange(event.target.value)}>
      ${options.map((option) => html`<option value=${option} selected=${option === value}>${option}</option>`)}
    </select>
  </label>`;
}

const CELLS = "rollouts: reward or ✓, turns, advantage; yellow: a part of the reward; dashed: ended by a limit";
function RolloutCell({ collection, entry, here }) {
  const state = entry.success ? "solved" : entry.end_reason !== "completed" ? "over" : entry.reward > 0 ? "part" : "missed";
  const title = `${entry.task} / ${entry.index}: ${entry.success ? "solved, " : ""}${entry.end_reason}, reward ${fixed(entry.reward)}, ${entry.turns} turns${advantageOf(entry, ", advantage ")}`;
  return html`<a class=${`cell stop ${state}`} href=${link("c", collection, "r", entry.cursor)} aria-current=${here && "page"}
    aria-label=${title} title=${entry.note ? `${title}\n${entry.note}` : title}>
    <b>${entry.success ? "✓" : percent(entry.reward)}${entry.note && " ✎"}</b>
    <span class="quiet">${entry.turns}t${advantageOf(entry)}</span>
  </a>`;
}

const SEARCH_AFTER_MS = 200;

/** A field for a text to search; `onText` is called with it when typing pauses. */
function SearchField({ label, value, onText }) {
  const field = useRef(null);
  const typing = useRef(0);
  useKeys({ "/": () => field.current.focus() });
  const type = (text) => {
    clearTimeout(typing.current);
    typing.current = setTimeout(() => onText(text), SEARCH_AFTER_MS);
  };
  return html`<label>${label} <input type="search" ref=${field} value=${value}
    onInput=${(event) => type(event.target.value)}
    onKeyDown=${(event) => {
      if (event.key !== "Escape") return;
      event.preventDefault(); // which would empty the field
      event.target.blur();
    }} /></label>`;
}

/** Search all collections of a run for a text: how many sequences of each have it, with a link to their list. */
function SearchAll({ collections }) {
  const [text, setText] = useState("");
  const counts = useRef({}); // what has not grown is not searched again
  const count = async ({ id, bytes }) => (counts.current[`${id} ${bytes} ${text}`] ??= (await api.search(id, text)).length);
  const found = useLoaded(
    async () => (text ? await Promise.all(collections.map(async (item) => ({ item, count: await count(item) }))) : []),
    [text, collections.map(({ id, bytes }) => `${id} ${bytes}`).join()],
  );
  const hits = (found.value ?? []).filter(({ count }) => count);
  return html`<div class="filters"><${SearchField} label="text in all rollouts" value=${text} onText=${setText} />
    ${found.error && html`<span class="error">${found.error}</span>`}
    ${text && !found.error && html`<span id="hits">${found.loading ? "…" : hits.length ? hits.map(
      ({ item, count }) => html`<a class="stop" href=${`${link("c", item.id)}?${new URLSearchParams({ ...chosenFilters, filter: "all", text })}`}><bdi>${item.name}</bdi>: ${count}</a>${count === 1 ? " rollout" : " rollouts"} · `,
    ) : "no rollout has this text"}</span>`}
  </div>`;
}

/** Open the next rollout with the searched text: of the list, else of the collections after it, and again from the first. */
async function openNextFound(collections, listed) {
  const { collection, cursor, view = "conversation" } = readAddress();
  const { text } = chosenFilters;
  if (!text) return;
  const next = listed[listed.findIndex((entry) => entry.cursors.includes(cursor)) + 1];
  if (next) return void (location.hash = link("c", collection, "r", next.cursor, view));
  const after = collections.findIndex(({ id }) => id === collection) + 1;
  for (const { id } of [...collections.slice(after), ...collections.slice(0, after)]) {
    const [first] = await api.search(id, text);
    if (first !== undefined) return void (location.hash = link("c", id, "r", first, view));
  }
}

const chosenFilters = { filter: "all", order: "task", backwards: "", text: "" };

/** The filters of the address, which wins, or those chosen last; unknown names are left out. */
function readFilters() {
  const { filter, order, backwards = "", text } = readQuery();
  if (Object.hasOwn(FILTERS, filter)) chosenFilters.filter = filter;
  if (Object.hasOwn(TASK_COLUMNS, order) || Object.hasOwn(ROLLOUT_COLUMNS, order)) Object.assign(chosenFilters, { order, backwards });
  if (text !== undefined) chosenFilters.text = text;
  return { ...chosenFilters };
}

/** Tasks with their rollouts among `entries`, and what a list says of them. */
function tasksOf(entries, failures) {
  const tasks = new Map();
  for (const entry of entries) {
    if (!tasks.has(entry.task)) tasks.set(entry.task, []);
    tasks.get(entry.task).push(entry);
  }
  return [...tasks].map(([task, group]) => ({
    task,
    group: group.sort((a, b) => a.index - b.index),
    mean: group.reduce((sum, entry) => sum + entry.reward, 0) / group.length,
    failed: countFailures([failures[task] || {}]),
  }));
}

/** `all` rollouts of a collection; of these, filtered and in the order of the list, the `entries`, and by task the `tasks`. */
function useListing(collection, stamp, { filter, order, backwards, text }, failures = {}) {
  const key = `${collection} ${stamp}`;
  const all = useLoaded(() => once(key, () => api.summaries(collection)), [key]);
  const found = useLoaded(async () => (text ? new Set(await once(`${key} ${text}`, () => api.search(collection, text))) : null), [key, text]);
  const shown = useMemo(() => {
    const entries = (all.value ?? []).filter(
      (entry) => FILTERS[filter](entry) && (!found.value || entry.cursors.some((cursor) => found.value.has(cursor))),
    );
    if (Object.hasOwn(ROLLOUT_COLUMNS, order)) return { entries: sortedRows(entries, ROLLOUT_COLUMNS[order], backwards) };
    const tasks = sortedRows(tasksOf(entries, failures), TASK_COLUMNS[order], backwards);
    return { entries: tasks.flatMap(({ group }) => group), tasks };
  }, [all.value, found.value, filter, order, backwards]);
  return { all: all.value, ...shown, searching: found.loading && text, error: all.error || found.error };
}

function CollectionPage({ collection, collections, stamp, failures, damage }) {
  const [settings, setSettings] = useState(readFilters);
  const set = (change) => {
    setSettings({ ...Object.assign(chosenFilters, change) });
    history.replaceState(null, "", `${link("c", collection)}?${new URLSearchParams(chosenFilters)}`);
  };
  const { all, entries, tasks, searching, error } = useListing(collection, stamp, settings, failures);
  const cycle = () => {
    const names = Object.keys(FILTERS);
    set({ filter: names[(names.indexOf(settings.filter) + 1) % names.length] });
  };
  useKeys({
    f: cycle,
    n: () => openNextFound(collections, entries),
    j: () => moveFocus(1),
    k: () => moveFocus(-1),
    u: () => (location.hash = "#/"),
  });
  if (error) return html`<p class="error">${error}</p>`;
  if (!all) return html`<p class="quiet">reading the log …</p>`;
  return html`<section>
    <div class="filters">
      <${Choice} label="show" options=${Object.keys(FILTERS)} value=${settings.filter} onChange=${(filter) => set({ filter })} />
      <${Choice} label="order" options=${Object.keys({ ...TASK_COLUMNS, ...ROLLOUT_COLUMNS })} value=${settings.order} onChange=${(order) => set({ order, backwards: "" })} />
      <button aria-pressed=${Boolean(settings.backwards)} onClick=${() => set({ backwards: settings.backwards ? "" : "1" })}>reverse</button>
      <${SearchField} label="text" value=${settings.text} onText=${(text) => set({ text })} />
      <span class="quiet" id="shown">${entries.length} of ${all.length} rollouts${searching ? " …" : ""}</span>
    </div>
    <${Damage} damage=${damage} />
    ${tasks ? html`<${TaskTable} collection=${collection} tasks=${tasks} failures=${failures} settings=${settings} onOrder=${set} />`
      : html`<${RolloutList} collection=${collection} entries=${entries} settings=${settings} onOrder=${set} />`}
  </section>`;
}

const TASK_HEIGHT = 54;
const ROLLOUT_HEIGHT = 30;

/** A task's name, and what it asks. */
const TaskCell = ({ task, asks, to }) => html`<td class="asks"><a class="stop" href=${to}><bdi>${task}</bdi></a>
  <div class="quiet" title=${asks}><bdi>${asks}</bdi></div></td>`;

function TaskTable({ collection, tasks, failures, settings, onOrder }) {
  const row = ({ task, group, mean, failed }) => html`<tr key=${task}>
    <${TaskCell} task=${task} asks=${group[0].asks} to=${link("c", collection, "t", task)} />
    <td>${fixed(mean)}</td>
    <td class=${failed ? "attempts" : "attempts none"} title=${attemptsByTask({ [task]: failures[task] || {} })}>${failed}</td>
    <td><div class="cells">${group.map((entry) => html`<${RolloutCell} key=${entry.cursor} collection=${collection} entry=${entry} />`)}</div></td>
  </tr>`;
  const columns = { ...TASK_COLUMNS, rollout: { heading: CELLS } };
  return html`<${LongTable} rows=${tasks} row=${row} height=${TASK_HEIGHT} className="wide tasks">
    <${Headings} columns=${columns} order=${settings.order} backwards=${settings.backwards} onOrder=${onOrder} /><//>`;
}

function RolloutList({ collection, entries, settings, onOrder }) {
  const columns = Object.entries(ROLLOUT_COLUMNS).slice(1, -1);
  const row = (entry) => html`<tr key=${entry.cursor}>
    <td><a class="stop" href=${link("c", collection, "r", entry.cursor)}><bdi>${entry.task} / ${entry.index}</bdi></a></td>
    ${columns.map(([name, column]) => html`<td>${written(column, entry)}${name === "reward" && entry.success && " ✓"}</td>`)}
    <td class="asks"><div class="quiet" title=${entry.asks}><bdi>${entry.asks}</bdi></div></td>
  </tr>`;
  return html`<${LongTable} rows=${entries} row=${row} height=${ROLLOUT_HEIGHT} className="wide">
    <${Headings} columns=${ROLLOUT_COLUMNS} order=${settings.order} backwards=${settings.backwards} onOrder=${onOrder} /><//>`;
}

/** The calls of the rollouts as rows of chips: how much the attempts at one task differ. */
function CallSequences({ group, collection }) {
  const loaded = useLoaded(
    () => Promise.all(group.map(async ({ cursors }) => (await Promise.all(cursors.map((cursor) => api.rollout(collection, cursor).catch(() => ({ calls: [] }))))).flatMap(({ calls }) => calls))),
    [collection, group.flatMap(({ cursors }) => cursors).join()],
  );
  if (!loaded.value || loaded.value.length !== group.length) return html`<p class="quiet">${loaded.error || "reading the calls …"}</p>`;
  if (!loaded.value.some((calls) => calls.length)) return null; // a task that is answered, not acted on
  const unique = new Set(loaded.value.map((calls) => JSON.stringify(calls))).size;
  const apps = [...new Set(loaded.value.flatMap((calls) => calls.map((call) => call.split(".")[0])))].sort();
  return html`<details open class="calls">
    <summary>calls: ${unique} different orders in ${group.length} rollouts</summary>
    ${group.map((entry, place) => ({ ...entry, calls: loaded.value[place] })).map(
      (entry) => html`<div class="call-row">
        <a class="stop" href=${link("c", collection, "r", entry.cursor)}>rollout ${entry.index}${entry.success ? " ✓" : ""}</a>
        ${entry.calls.slice(0, 40).map(
          (call) => html`<span class=${`call app${apps.indexOf(call.split(".")[0]) % 6}`}><bdi>${call}</bdi></span>`,
        )}
        ${entry.calls.length > 40 && html`<span class="quiet">and ${entry.calls.length - 40} more</span>`}
      </div>`,
    )}
  </details>`;
}

/** The rollouts of a task. */
const siblingsOf = (entries, task) => entries.filter((entry) => entry.task === task).sort((a, b) => a.index - b.index);

function TaskPage({ collection, task, stamp }) {
  const { all, error } = useListing(collection, stamp, chosenFilters);
  useKeys({ j: () => moveFocus(1), k: () => moveFocus(-1), u: () => (location.hash = link("c", collection)) });
  if (error) return html`<p class="error">${error}</p>`;
  if (!all) return html`<p class="quiet">reading the log …</p>`;
  const group = siblingsOf(all, task);
  return html`<section>
    <p class="facts"><a href=${link("everywhere", task)}>this task ${EVERYWHERE}</a></p>
    ${group.length ? html`<${TaskColumns} collection=${collection} group=${group} />` : html`<p class="quiet">no rollout of this task here</p>`}
  </section>`;
}

/** The beginning that all rollouts of a task share, once; then their calls, and the rest of each. */
function TaskColumns({ collection, group }) {
  const first = useLoaded(() => api.rollout(collection, group[0].cursor), [collection, group[0].cursor]);
  // Messages of the same place stand in one row of the grid: besides them a head, requirements, and what begins a sequence.
  const rows = 2 + Math.max(...group.map((entry) => entry.messages + 2 * entry.segments));
  const opening = first.value ? first.value.messages.slice(0, openingOf(first.value)) : [];
  return html`${opening.length > 0 && html`<${Opening} folded=${opening.slice(0, -1)} task=${opening.at(-1)} />`}
    <${CallSequences} group=${group} collection=${collection} />
    ${group.length > 1 && html`<p class="quiet">${group.length} rollouts side by side; beyond the edge: scroll to the right, or press j and k</p>`}
    <div class="columns" style=${{ "--rows": rows }}>
      ${group.map((entry) => html`<${Column} key=${entry.cursor} collection=${collection} entry=${entry} opening=${opening} />`)}
    </div>`;
}

const EVERYWHERE = "in all iterations and evaluations";

/** A task's rollouts in all collections of the run; two that are ticked are set beside each other. */
function EverywherePage({ task, run }) {
  const { collections } = run;
  const loaded = useLoaded(
    () => Promise.all(collections.map(async (item) => ({ ...item, group: siblingsOf(await api.summaries(item.id), task) }))),
    [collections.map(({ id, bytes }) => `${id} ${bytes}`).join()],
  );
  const tick = usePair((...places) => (location.hash = link("beside", ...places)));
  useKeys({ j: () => moveFocus(1), k: () => moveFocus(-1), u: () => (location.hash = "#/") });
  if (loaded.error) return html`<p class="error">${loaded.error}</p>`;
  if (!loaded.value) return html`<p class="quiet">reading the logs …</p>`;
  const rows = loaded.value.filter(({ group }) => group.length);
  return html`<section class="everywhere">
    ${rows.length > 0 && html`<p><bdi>${rows[0].group[0].asks}</bdi></p>`}
    <p class="quiet">${rows.length ? "Tick two rollouts to set them beside each other." : "No collection has a rollout of this task."}</p>
    <table class="wide">
      <thead><tr><th>collection</th><th>mean reward</th><th>${CELLS}</th></tr></thead>
      <tbody>${rows.map(({ id, name, group }) => html`<tr key=${id}>
        <td><a class="stop" href=${link("c", id, "t", task)}><bdi>${name}</bdi></a></td>
        <td>${fixed(group.reduce((sum, entry) => sum + entry.reward, 0) / group.length)}</td>
        <td><div class="cells">${group.map((entry) => html`<span class="both" key=${entry.cursor}>
          <input type="checkbox" aria-label=${`${name}, rollout ${entry.index}: beside`} onChange=${(event) => tick([id, entry.cursor], event.target.checked)} />
          <${RolloutCell} collection=${id} entry=${entry} /></span>`)}</div></td>
      </tr>`)}</tbody>
    </table>
  </section>`;
}

/** Columns of two evaluations beside each other. */
const AGAINST_COLUMNS = {
  task: { of: ({ task }) => task },
  first: { of: ({ first }) => first, number: percent },
  second: { of: ({ second }) => second, number: percent },
  change: { of: ({ change }) => change, number: (value) => (value > 0 ? "gained" : value < 0 ? "lost" : "as before") },
};

/** Two evaluations by task: the success of each, and which tasks the second gained or lost. */
function AgainstPage({ collection, other, run }) {
  const nameOf = (id) => run.collections.find((item) => item.id === id)?.name ?? id;
  const ids = [collection, other];
  const loaded = useLoaded(async () => (await Promise.all(ids.map(api.summaries))).map((entries) => new Map(tasksOf(entries, {}).map((each) => [each.task, each.group]))), ids);
  const [sort, setSort] = useState({ order: "change", backwards: "" });
  useKeys({ j: () => moveFocus(1), k: () => moveFocus(-1), u: () => (location.hash = "#/") });
  if (loaded.error) return html`<p class="error">${loaded.error}</p>`;
  if (!loaded.value) return html`<p class="quiet">reading the logs …</p>`;
  const [groups, others] = loaded.value;
  const success = (group) => group.filter((entry) => entry.success).length / group.length;
  const rows = [...groups].filter(([task]) => others.has(task)).map(([task, group]) => {
    const [first, second] = [success(group), success(others.get(task))];
    return { task, sides: [group, others.get(task)], first, second, change: second - first };
  });
  const count = (keep) => rows.filter(({ change }) => keep(change)).length;
  const alone = groups.size + others.size - 2 * rows.length;
  const columns = { ...AGAINST_COLUMNS, first: { heading: `${nameOf(collection)}: solved`, number: percent }, second: { heading: `${nameOf(other)}: solved`, number: percent } };
  const row = (each) => html`<tr key=${each.task}>
    <${TaskCell} task=${each.task} asks=${each.sides[0][0].asks} to=${link("everywhere", each.task)} />
    ${ids.map((id, side) => html`<td>${percent(success(each.sides[side]))} <div class="cells">${each.sides[side].map((entry) => html`<${RolloutCell} key=${entry.cursor} collection=${id} entry=${entry} />`)}</div></td>`)}
    <td class="change">${written(AGAINST_COLUMNS.change, each)}, <a href=${link("beside", collection, each.sides[0][0].cursor, other, each.sides[1][0].cursor)}>side by side</a></td>
  </tr>`;
  return html`<section>
    <p id="gained">${rows.length ? html`Of ${rows.length} tasks, <b><bdi>${nameOf(other)}</bdi></b> gained ${count((change) => change > 0)} and lost ${count((change) => change < 0)}` : html`<b><bdi>${nameOf(other)}</bdi></b> shares no task`}${" "}
      ${rows.length ? "against" : "with"} <b><bdi>${nameOf(collection)}</bdi></b>${alone > 0 && html`; ${alone} tasks are in one of them only`}.</p>
    <${LongTable} rows=${sortedRows(rows, AGAINST_COLUMNS[sort.order], sort.backwards)} row=${row} height=${TASK_HEIGHT} className="wide">
      <${Headings} columns=${columns} ...${sort} onOrder=${setSort} /><//>
  </section>`;
}

function Column({ collection, entry, opening }) {
  const loaded = useLoaded(() => api.rollout(collection, entry.cursor), [collection, entry.cursor]);
  return html`<article class="column">
    <h2><${RolloutCell} collection=${collection} entry=${entry} /> rollout ${entry.index}</h2>
    ${loaded.error && html`<p class="error">${loaded.error}</p>`}
    ${loaded.value &&
    html`<${Requirements} requirements=${loaded.value.requirements} /><${Thread} rollout=${loaded.value} above=${opening} />`}
  </article>`;
}

function Origin({ origin }) {
  const name = html`<bdi>${origin.rollout_id}</bdi>`;
  return html`<p class="quiet">goes on from ${origin.cursor === null
      ? name
      : html`<a href=${link("c", origin.collection, "r", origin.cursor)}>${name}</a>`} after ${origin.turns} turns</p>`;
}

/** Readers' note on a rollout; words such as #wrong are its labels, which the search finds. */
function Note({ collection, cursor, note }) {
  const [text, setText] = useState(note);
  const [saved, setSaved] = useState(note);
  const [error, setError] = useState("");
  if (isExport) return note && html`<p class="note"><span class="quiet">note</span> ${withControls(note)}</p>`;
  const save = () => api.note(collection, cursor, text).then(() => (kept.clear(), setSaved(text), setError("")), (failure) => setError(failure.message));
  return html`<details class="note" open=${Boolean(note)}>
    <summary>note</summary>
    <textarea aria-label="note" rows="2" value=${text} placeholder="what is seen here; #labels" onInput=${(event) => setText(event.target.value)}></textarea>
    <button disabled=${text === saved} onClick=${save}>${text === saved && text ? "kept" : "keep"}</button>
    ${error && html`<span class="error"><bdi>${error}</bdi></span>`}
  </details>`;
}

function Program({ program }) {
  const { refusals = [], exit_status: status, output } = program;
  return html`${refusals.map(
      (each) => html`<p class="error">its program was refused${each.times > 1 && ` ${each.times} times`}: ${each.status} <bdi>${each.said}</bdi></p>`,
    )}
    ${status !== undefined && status !== 0 &&
    html`<p class="quiet">its program ${status === null ? "had to be ended" : `ended with exit status ${status}`}</p>`}
    ${output && html`<details><summary>what it printed last</summary><pre>${output}</pre></details>`}`;
}

function RolloutPage({ collection, collections, cursor, view, stamp, onShown }) {
  const loaded = useLoaded(() => api.rollout(collection, cursor), [collection, cursor]);
  const { all = [], entries, searching, error } = useListing(collection, stamp, chosenFilters);
  const rollout = loaded.value;
  const isHere = (entry) => entry.cursors.includes(cursor);
  const own = all.find(isHere);
  const group = own ? siblingsOf(all, own.task) : [];
  const listed = entries.some(isHere) ? entries : group;
  // The address may be ahead of what is drawn, when keys follow one another quickly.
  const show = (name) => (location.hash = link("c", collection, "r", readAddress().cursor, name));
  const step = (by) => {
    const here = readAddress();
    const next = listed[listed.findIndex((entry) => entry.cursors.includes(here.cursor)) + by];
    if (next) location.hash = link("c", collection, "r", next.cursor, here.view);
  };
  useKeys({
    "[": () => step(-1),
    "]": () => step(1),
    1: () => show("conversation"),
    2: () => show("tokens"),
    j: () => scrollBy({ top: innerHeight * 0.6 }),
    k: () => scrollBy({ top: -innerHeight * 0.6 }),
    e: nextTrouble,
    n: () => openNextFound(collections, entries),
    u: () => (location.hash = own ? link("c", collection, "t", own.task) : link("c", collection)),
  });
  useEffect(() => own && onShown({ cursor, task: own.task, index: own.index }), [own?.task, own?.index, cursor]);
  const shown = useRef(null);
  useEffect(() => markFound(shown.current, chosenFilters.text));
  if (loaded.error || error) return html`<p class="error">${loaded.error || error}</p>`;
  // Drawn when its neighbours are known too, so that no key is pressed in vain on a page that looks complete.
  if (!rollout || rollout.cursor !== cursor || !own || searching) return html`<p class="quiet">reading the rollout …</p>`;
  const facts = {
    task: html`<a href=${link("c", collection, "t", rollout.task_id)}>${rollout.task_id}</a>`,
    reward: fixed(rollout.reward),
    advantage: advantageOf(own, ""),
    end: rollout.end_reason,
    turns: own.turns,
    tokens: own.tokens.toLocaleString(),
    temperature: rollout.temperature,
    ...Object.fromEntries([policyFact(rollout, [...new Set(rollout.turns.map((turn) => turn.policy_version))].join(", "))]),
    seconds: fixed(rollout.seconds, 1),
    ...(own.segments > 1 && { sequences: own.segments }),
  };
  return html`<section ref=${shown}>
    <div class="siblings">${group.map(
      (entry) => html`<span class=${isHere(entry) ? "here" : ""}><${RolloutCell} collection=${collection} entry=${entry} here=${isHere(entry)} /></span>`,
    )}</div>
    <p class="quiet" id="place"><button aria-label="previous rollout" onClick=${() => step(-1)}>‹</button> ${listed.findIndex(isHere) + 1} of ${listed.length} ${listed === group ? "of this task" : "listed"} <button aria-label="next rollout" onClick=${() => step(1)}>›</button></p>
    <${Facts} facts=${facts} />
    <p class="facts">
      ${group.length > 1 && html`<label>beside${" "}<select onChange=${(event) => (location.hash = link("beside", collection, cursor, collection, event.target.value))}>
        <option value="">another rollout</option>
        ${group.filter((entry) => !isHere(entry)).map((entry) => html`<option value=${entry.cursor}>${entry.index}, reward ${fixed(entry.reward)}</option>`)}
      </select></label>`}
      ${navigator.clipboard && html`<button id="copy" onClick=${() => navigator.clipboard.writeText(JSON.stringify(rollout, null, 1))}>copy as JSON</button>`}
    </p>
    ${rollout.branch_of && html`<${Origin} origin=${rollout.branch_of} />`}
    ${rollout.ungradable && html`<p class="error">its state could not be graded: <bdi>${rollout.ungradable}</bdi></p>`}
    ${rollout.broke && html`<p class="error">its environment broke in ${rollout.broke.where}: <bdi>${rollout.broke.what}</bdi></p>`}
    ${rollout.program && html`<${Program} program=${rollout.program} />`}
    <${Note} key=${own.cursor} collection=${collection} cursor=${own.cursor} note=${own.note} />
    <${Requirements} requirements=${rollout.requirements} />
    <${TurnStrip} rollout=${rollout} />
    <nav class="tabs" aria-label="views">
      ${["conversation", "tokens"].map(
        (name) => html`<a class="stop" aria-current=${view === name && "page"} href=${link("c", collection, "r", cursor, name)}>${name}</a>`,
      )}
    </nav>
    ${view === "tokens" && rollout.thread.length > 1 &&
    html`<nav class="tabs" aria-label="sequences">sequences ${rollout.thread.map(
      (each, place) => html`<a class="stop" aria-current=${each.cursor === cursor && "page"} href=${link("c", collection, "r", each.cursor, view)}>${place + 1}</a>`,
    )}</nav>`}
    ${view === "tokens" ? html`<${Tokens} key=${cursor} rollout=${rollout} />` : html`<${Thread} rollout=${rollout} />`}
  </section>`;
}
