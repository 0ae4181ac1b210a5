// Several runs: a list of them, and one quantity of those that are ticked.
"use strict";

const SHOWN_AT_FIRST = 8;
/** Columns of the list: what a run's row says, and how it is written. */
const COLUMNS = {
  run: { of: ({ name }) => name },
  state: { of: ({ state }) => state },
  "time left": { of: ({ seconds_left: value }) => value, number: duration },
  iterations: { of: ({ iterations }) => iterations, number: (value) => value },
  reward: { of: ({ reward }) => reward, number: fixed },
  success: { of: ({ success }) => success, number: percent },
  "dev success": { of: ({ dev_success: value }) => value, number: percent },
  "held-out success": { of: ({ held_out_success: value }) => value, number: percent },
  model: { of: ({ model }) => model },
  algorithm: { of: ({ algorithm }) => algorithm },
  tasks: { of: ({ dataset }) => dataset },
};
/** The name in a run's legends -> the metric, and the chart that it is drawn in. */
const QUANTITIES = Object.fromEntries(CURVES.flatMap((chart) => Object.entries(chart.keys).map(([key, label]) => [label, { ...chart, key }])));

/** The runs of the first settings of a list, as many as can be told apart. */
function shownAtFirst(runs) {
  const settings = [...new Set(runs.map(({ name, setting }) => setting || name))].slice(0, SHOWN_AT_FIRST);
  return runs.filter(({ name, setting }) => settings.includes(setting || name)).map(({ name }) => name);
}

/** What names begin with alike, without the separator behind it; the first and dots where they share nothing. */
function sharedStart(names) {
  const end = [...names[0]].findIndex((letter, place) => names.some((name) => name[place] !== letter));
  return names[0].slice(0, end).replace(/[\W_]+$/, "") || `${names[0]} …`;
}

function FolderPage({ folder }) {
  const { runs } = folder;
  const asked = useMemo(readQuery, []);
  const [sort, setSort] = useState({ order: Object.hasOwn(COLUMNS, asked.order) ? asked.order : "run", backwards: asked.backwards ?? "" });
  const offered = Object.keys(QUANTITIES).filter((label) => folder.quantities.includes(QUANTITIES[label].key));
  const [chosen, setChosen] = useState(asked.quantity);
  const quantity = offered.includes(chosen) ? chosen : offered[0];
  const names = runs.map(({ name }) => name);
  const [ticked, setTicked] = useState(() => new Set(asked.runs === undefined ? shownAtFirst(runs) : asked.runs.split("\n")));
  const [merged, setMerged] = useState(asked.seeds !== "apart");
  const drawn = names.filter((name) => ticked.has(name));
  const curves = useLoaded(async () => quantity && { quantity, lines: await api.curves(QUANTITIES[quantity].key, drawn) }, [quantity, JSON.stringify(drawn), folder]);
  useKeys({ j: () => moveFocus(1), k: () => moveFocus(-1) });
  const choose = (change) => {
    setSort(change);
    writeQuery(change);
  };
  const tick = (name, on) => {
    const next = new Set(ticked);
    if (on) next.add(name);
    else next.delete(name);
    setTicked(next);
    writeQuery({ runs: [...next].join("\n") });
  };
  const columns = Object.fromEntries(Object.entries(COLUMNS).filter(([, { of }]) => runs.some((row) => (of(row) ?? "") !== "")));
  // The page draws the last loaded curves until the newly chosen ones are there.
  const { key, title, ...chart } = QUANTITIES[curves.value?.quantity] ?? {};
  const settingOf = Object.fromEntries(runs.map(({ name, setting }) => [name, (merged && setting) || name]));
  const settings = [...new Set(Object.values(settingOf))];
  const placeOf = (name) => settings.indexOf(settingOf[name]);
  const lines = Object.entries(curves.value?.lines ?? {}).map(([name, each]) => ({ name, values: valuesOf(each, key) })).filter(({ values }) => values.size);
  const series = Object.values(Object.groupBy(lines, ({ name }) => settingOf[name])).map((group) => ({
    label: group.length > 1 ? `${sharedStart(group.map(({ name }) => name))}: mean of ${group.length} runs` : group[0].name,
    place: placeOf(group[0].name),
    gaps: hasGaps(key),
    ...(group.length > 1 ? meanOf(group.map(({ values }) => values)) : group[0]),
  }));
  const alike = new Set(runs.map(({ setting }) => setting)).size < runs.length && runs.some(({ setting }) => setting);
  return html`<section>
    ${quantity && html`<div class="filters">
        <${Choice} label="curves of" options=${offered} value=${quantity} onChange=${(value) => {
          setChosen(value);
          writeQuery({ quantity: value });
        }} />
        ${alike && html`<label title="runs whose configs differ in seed, folder and length alone"><input type="checkbox" checked=${merged} onChange=${(event) => {
          setMerged(event.target.checked);
          writeQuery({ seeds: event.target.checked ? "" : "apart" });
        }} /> seeds of a setting as their mean, in a band from lowest to highest</label>`}
        ${curves.error && html`<span class="error">${curves.error}</span>`}
      </div>
      <${Chart} ...${chart} title=${`${curves.value?.quantity} ${/\(.*\)/.exec(title)?.[0] ?? ""}`} series=${series} stamp=${`${merged} ${JSON.stringify(curves.value)}`} height=${FOLDER_CURVE_HEIGHT} />`}
    <table class="wide" id="runs">
      <${Headings} columns=${columns} ...${sort} onOrder=${choose} />
      <tbody>${sortedRows(runs, COLUMNS[sort.order], sort.backwards).map((row) => html`<${RunRow} key=${row.name} row=${row} columns=${columns}
        place=${placeOf(row.name)} ticked=${ticked.has(row.name)} tick=${tick} />`)}</tbody>
    </table>
    ${runs.length > 1 && html`<p><a class="stop" href=${pathOf(folder.whole)}>all rollouts as those of one run</a>
      <span class="quiet">: a task's rollouts by several runs, two beside each other</span></p>`}
  </section>`;
}

function RunRow({ row, columns, place, ticked, tick }) {
  const first = html`<td><input type="checkbox" checked=${ticked} aria-label=${`draw ${row.name}`} onChange=${(event) => tick(row.name, event.target.checked)} />
    <span class="swatch" style=${{ background: ticked ? colourOf(place) : "none" }}></span>
    <a class="stop" href=${pathOf(row.name)}><bdi>${row.name}</bdi></a>${row.damage?.length > 0 && html` <span class="error" title=${row.damage[0]}>${row.damage.length} damaged lines left out</span>`}</td>`;
  if (row.error) return html`<tr>${first}<td colspan=${Object.keys(columns).length - 1} class="error"><bdi>${row.error}</bdi></td></tr>`;
  return html`<tr>${first}${Object.entries(columns).slice(1).map(([name, column]) => {
    const title = name === "held-out success" ? row.held_out_policy : "";
    return html`<td class=${name === "state" && row.runs ? "state live" : ""} title=${title}><bdi>${written(column, row)}</bdi></td>`;
  })}</tr>`;
}
