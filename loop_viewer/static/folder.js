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
/** What a run's legends name -> the metric, and the chart that it is drawn in. */
const QUANTITIES = Object.fromEntries(CURVES.flatMap((chart) => Object.entries(chart.keys).map(([key, label]) => [label, { ...chart, key }])));

/** Rows by a column, numbers from high to low and texts from a to z, or the other way round; those without it last. */
function sortedRows(rows, column, backwards) {
  const { of, number } = COLUMNS[column];
  const there = rows.filter((row) => (of(row) ?? "") !== "");
  const compare = number ? (a, b) => of(b) - of(a) : (a, b) => of(a).localeCompare(of(b), undefined, { numeric: true });
  there.sort((a, b) => (backwards ? -1 : 1) * compare(a, b));
  return [...there, ...rows.filter((row) => !there.includes(row))];
}

function FolderPage({ folder }) {
  const { runs } = folder;
  const asked = useMemo(readQuery, []);
  const [sort, setSort] = useState({ column: Object.hasOwn(COLUMNS, asked.sort) ? asked.sort : "run", backwards: asked.backwards === "1" });
  const offered = Object.keys(QUANTITIES).filter((label) => folder.quantities.includes(QUANTITIES[label].key));
  const [chosen, setChosen] = useState(asked.quantity);
  const quantity = offered.includes(chosen) ? chosen : offered[0];
  const names = runs.map(({ name }) => name);
  const [ticked, setTicked] = useState(() => new Set(asked.runs === undefined ? names.slice(0, SHOWN_AT_FIRST) : asked.runs.split("\n")));
  const drawn = names.filter((name) => ticked.has(name));
  const curves = useLoaded(async () => quantity && { quantity, lines: await api.curves(QUANTITIES[quantity].key, drawn) }, [quantity, JSON.stringify(drawn), folder]);
  useKeys({ j: () => moveFocus(1), k: () => moveFocus(-1) });
  const choose = (column) => {
    const backwards = sort.column === column && !sort.backwards;
    setSort({ column, backwards });
    writeQuery({ sort: column, backwards: backwards ? "1" : "" });
  };
  const tick = (name, on) => {
    const next = new Set(ticked);
    if (on) next.add(name);
    else next.delete(name);
    setTicked(next);
    writeQuery({ runs: [...next].join("\n") });
  };
  const columns = Object.keys(COLUMNS).filter((column) => runs.some((row) => (COLUMNS[column].of(row) ?? "") !== ""));
  // What is drawn is what was loaded last, until what was chosen since is there.
  const { key, title, ...chart } = QUANTITIES[curves.value?.quantity] ?? {};
  const series = Object.entries(curves.value?.lines ?? {}).map(([name, lines]) => ({
    label: name,
    place: names.indexOf(name),
    values: valuesOf(lines, key),
    gaps: hasGaps(key),
  }));
  return html`<section>
    ${quantity && html`<div class="filters">
        <${Choice} label="curves of" options=${offered} value=${quantity} onChange=${(value) => {
          setChosen(value);
          writeQuery({ quantity: value });
        }} />
        ${curves.error && html`<span class="error">${curves.error}</span>`}
      </div>
      <${Chart} ...${chart} title=${`${curves.value?.quantity} ${/\(.*\)/.exec(title)?.[0] ?? ""}`} series=${series} stamp=${curves.value} height=${FOLDER_CURVE_HEIGHT} />`}
    <table class="wide" id="runs">
      <thead><tr>${columns.map((column) => html`<th><button aria-pressed=${sort.column === column} class=${sort.backwards ? "backwards" : ""}
        onClick=${() => choose(column)}>${column}</button></th>`)}</tr></thead>
      <tbody>${sortedRows(runs, sort.column, sort.backwards).map((row) => html`<${RunRow} key=${row.name} row=${row} columns=${columns}
        place=${names.indexOf(row.name)} ticked=${ticked.has(row.name)} tick=${tick} />`)}</tbody>
    </table>
    ${runs.length > 1 && html`<p><a class="stop" href=${pathOf(folder.whole)}>all rollouts as those of one run</a>
      <span class="quiet">: a task's rollouts by several runs, two beside each other</span></p>`}
  </section>`;
}

function RunRow({ row, columns, place, ticked, tick }) {
  const first = html`<td><input type="checkbox" checked=${ticked} aria-label=${`draw ${row.name}`} onChange=${(event) => tick(row.name, event.target.checked)} />
    <span class="swatch" style=${{ background: ticked ? colourOf(place) : "none" }}></span>
    <a class="stop" href=${pathOf(row.name)}><bdi>${row.name}</bdi></a>${row.damage?.length > 0 && html` <span class="error" title=${row.damage[0]}>${row.damage.length} damaged lines left out</span>`}</td>`;
  if (row.error) return html`<tr>${first}<td colspan=${columns.length - 1} class="error"><bdi>${row.error}</bdi></td></tr>`;
  return html`<tr>${first}${columns.slice(1).map((column) => {
    const { of, number } = COLUMNS[column];
    const value = of(row) ?? "";
    const title = column === "held-out success" ? row.held_out_policy : "";
    return html`<td class=${column === "state" && row.runs ? "state live" : ""} title=${title}><bdi>${value === "" ? "–" : number ? number(value) : value}</bdi></td>`;
  })}</tr>`;
}
