// Where the page gets its data: a server, or the script elements of an exported file. Everything that agents wrote is
// only ever put into text nodes.
"use strict";

const { html, render, Component, useState, useEffect, useLayoutEffect, useRef, useMemo } = htmPreact;

const embedded = new Map();
for (const element of document.querySelectorAll('script[type="application/json"]')) {
  embedded.set(element.dataset.name, element);
}
const isExport = embedded.has("run");

async function answerOf(request) {
  const answer = await request;
  const data = await answer.json().catch(() => ({ error: `HTTP ${answer.status} for ${new URL(answer.url).pathname}` }));
  if (!answer.ok || data?.error) throw new Error(data.error || `HTTP ${answer.status}`);
  return data;
}

async function fetchData(name, url) {
  if (isExport) {
    const element = embedded.get(name);
    if (!element) throw new Error(`${name} is not part of this file`);
    return JSON.parse(element.textContent);
  }
  return answerOf(fetch(url));
}

const KEPT = 6;
const kept = new Map();

/** The result of `load` for `key`, cached: a list is read once for the pages that need it. */
function once(key, load) {
  if (!kept.has(key)) {
    if (kept.size === KEPT) kept.delete(kept.keys().next().value);
    const loading = load();
    kept.set(key, loading);
    loading.catch(() => kept.delete(key));
  }
  return kept.get(key);
}

/** The episodes of a collection as rows, from their columns. */
function rowsOf({ columns, named, texts }) {
  const keys = Object.keys(columns);
  return columns.cursors.map((cursors, place) => {
    const row = { cursor: cursors[0] };
    for (const key of keys) row[key] = columns[key][place];
    for (const key of named) row[key] = texts[row[key]] ?? null;
    return row;
  });
}

/** Addresses are relative: those of a run in a folder begin with its own. */
const api = {
  run: () => fetchData("run", "api/run"),
  curves: (quantity, names) => fetchData("", `api/curves/${quantity}?${new URLSearchParams(names.map((name) => ["run", name]))}`),
  summaries: async (id) => rowsOf(await fetchData(`collection/${id}`, `api/collections/${encodeURIComponent(id)}`)),
  rollout: (id, cursor) =>
    fetchData(`rollout/${id}/${cursor}`, `api/collections/${encodeURIComponent(id)}/rollouts/${cursor}`),
  branch: (id, cursor, turn) =>
    answerOf(
      fetch(`api/collections/${encodeURIComponent(id)}/rollouts/${cursor}/turns/${turn}/branch`, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: "{}",
      }),
    ),
  note: (id, cursor, note) =>
    answerOf(
      fetch(`api/collections/${encodeURIComponent(id)}/rollouts/${cursor}/note`, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ note }),
      }),
    ),
  branchState: (id) => answerOf(fetch(`api/branches/${encodeURIComponent(id)}`)),
  async search(id, text) {
    if (!isExport) {
      return fetchData("", `api/collections/${encodeURIComponent(id)}/search?q=${encodeURIComponent(text)}`);
    }
    const wanted = text.toLowerCase();
    const found = [];
    for (const entry of await api.summaries(id)) {
      for (const rollout of await Promise.all(entry.cursors.map((cursor) => api.rollout(id, cursor)))) {
        const ids = `${rollout.task_id}\n${rollout.rollout_id}\n${entry.note}`.toLowerCase();
        if (ids.includes(wanted) || rollout.messages.some((message) => `${message.content}\n${message.reasoning ?? ""}`.toLowerCase().includes(wanted))) found.push(rollout.cursor);
      }
    }
    return found;
  },
};

/** The result of an asynchronous function, asked again when `inputs` change: {value, error, loading}. */
function useLoaded(load, inputs) {
  const [state, setState] = useState({ loading: true });
  useEffect(() => {
    let current = true;
    setState((old) => ({ ...old, loading: true, error: undefined }));
    load().then(
      (value) => current && setState({ value, loading: false }),
      (error) => current && setState({ error: String(error.message || error), loading: false }),
    );
    return () => {
      current = false;
    };
  }, inputs);
  return state;
}

/** A fact, [name, value], on who sampled a turn: in an evaluation the policy's name, because its version is a hash. */
const policyFact = ({ policy }, version) => (policy ? ["policy", policy] : ["policy version", version]);

/** Turns of a rollout's episode that another rollout sampled. */
const turnsBefore = (rollout) => (rollout.branch_of ? rollout.branch_of.turns : 0);

const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(100 * value)}%`);
/** With so many digits; what they round to nothing is 0, not -0. */
const fixed = (value, digits = 3) => (value === null || value === undefined ? "–" : value.toFixed(digits).replace(/^-(0\.?0*)$/, "$1"));
const signed = (value) => (value > 0.005 ? "+" : "") + fixed(value, 2);
/** A rollout's advantage; "" if it has none, as in an evaluation. */
const advantageOf = ({ advantage }, before = " ") => ((advantage ?? null) === null ? "" : before + signed(advantage));
const link = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;

/** From the page of a folder to that of one of its runs, and back. */
const pathOf = (run) => `run/${encodeURIComponent(run)}/`;
const TO_FOLDER = "../../";

/**
 * Call `handlers[key]` of the last rendering for a key pressed outside of text fields. A layout effect, because effects
 * run some time after the page is drawn, and a key pressed in between would be lost.
 */
function useKeys(handlers) {
  const latest = useRef(handlers);
  latest.current = handlers;
  useLayoutEffect(() => {
    const onKey = (event) => {
      if (document.querySelector("dialog") && event.key !== "?") return;
      if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
      const handler = latest.current[event.key];
      if (handler) {
        event.preventDefault();
        handler(event);
      }
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
}

const collator = new Intl.Collator(undefined, { numeric: true });

/** Rows by a column, numbers from high to low and texts from a to z, or the other way round; those without it last. */
function sortedRows(rows, { of, number }, backwards) {
  const isThere = (row) => (of(row) ?? "") !== "";
  const compare = number ? (a, b) => of(b) - of(a) : (a, b) => collator.compare(of(a), of(b));
  const there = rows.filter(isThere).sort((a, b) => (backwards ? -1 : 1) * compare(a, b));
  return [...there, ...rows.filter((row) => !isThere(row))];
}

/** A row's value of a column, as it is written. */
function written({ of, number }, row) {
  const value = of(row) ?? "";
  return value === "" ? "–" : number ? number(value) : value;
}

/** The head of a table that is ordered by a click on a column's name; a second click turns the order round. */
function Headings({ columns, order, backwards, onOrder }) {
  return html`<thead><tr>${Object.entries(columns).map(([name, { number, heading = name, further }]) => html`<th scope="col" class=${further ?? ""}
    aria-sort=${order !== name ? undefined : Boolean(number) === Boolean(backwards) ? "ascending" : "descending"}>
    <button onClick=${() => onOrder({ order: name, backwards: order === name && !backwards ? "1" : "" })}>${heading}</button></th>`)}</tr></thead>`;
}

/** True while the page is being printed: then nothing of it is left out. */
function usePrinting() {
  const [printing, setPrinting] = useState(false);
  useLayoutEffect(() => {
    const listeners = { beforeprint: () => setPrinting(true), afterprint: () => setPrinting(false) };
    for (const [name, listener] of Object.entries(listeners)) addEventListener(name, listener);
    return () => Object.entries(listeners).forEach(([name, listener]) => removeEventListener(name, listener));
  }, []);
  return printing;
}

/**
 * Which chunks of a long list are near the screen, by what their `data-chunk` says. The others are not in the document;
 * each keeps its height while it is away. `first` is one that is drawn at once; `inputs` change with the chunks.
 */
function useNear(list, inputs, margin, first = 0) {
  const [near, setNear] = useState(() => new Set([0, first]));
  const heights = useRef(new Map());
  const printing = usePrinting();
  useEffect(() => {
    const observer = new IntersectionObserver(
      (entries) => {
        setNear((old) => {
          const next = new Set(old);
          for (const entry of entries) {
            const start = Number(entry.target.dataset.chunk);
            if (entry.isIntersecting) next.add(start);
            else if (next.delete(start)) heights.current.set(start, entry.boundingClientRect.height);
          }
          return next;
        });
      },
      { rootMargin: `${margin}px 0px` },
    );
    for (const chunk of list.current.querySelectorAll("[data-chunk]")) observer.observe(chunk);
    return () => observer.disconnect();
  }, inputs);
  return {
    near,
    has: (start) => printing || near.has(start),
    add: (start) => setNear((old) => new Set(old).add(start)),
    height: (start, expected) => `${heights.current.get(start) ?? expected}px`,
  };
}

const ROWS = 20;
const ROWS_MARGIN = 600;

/** A table of any length under `children`, its head; `row` draws one of `rows`, about `height` pixels high. */
function LongTable({ rows, row, height, className, children }) {
  const table = useRef(null);
  const chunks = useNear(table, [rows], ROWS_MARGIN);
  const starts = [...Array(Math.ceil(rows.length / ROWS)).keys()].map((place) => place * ROWS);
  return html`<table class=${className} ref=${table} aria-rowcount=${rows.length + 1}>
    ${children}
    ${starts.map((start) => {
      const part = rows.slice(start, start + ROWS);
      return html`<tbody key=${start} data-chunk=${start}>${
        chunks.has(start) ? part.map(row) : html`<tr style=${{ height: chunks.height(start, part.length * height) }}></tr>`}</tbody>`;
    })}
  </table>`;
}

/** The query of the address, behind the ?, as {name: value}. */
const readQuery = () => Object.fromEntries(new URLSearchParams(location.hash.split("?")[1] || ""));

/** Have the address say `change` after its ?, so that whoever opens it sees the same; nothing is loaded for it. */
function writeQuery(change) {
  const query = new URLSearchParams({ ...readQuery(), ...change });
  history.replaceState(null, "", `${location.hash.split("?")[0] || "#/"}?${query}`);
}

/** Mark where `text` stands below `root`, without touching the document. */
function markFound(root, text) {
  if (!window.CSS?.highlights) return;
  CSS.highlights.delete("found");
  const wanted = text.toLowerCase();
  if (!root || !wanted) return;
  const ranges = [];
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const content = node.data.toLowerCase();
    for (let at = content.indexOf(wanted); at >= 0; at = content.indexOf(wanted, at + wanted.length)) {
      const range = new Range();
      range.setStart(node, at);
      range.setEnd(node, Math.min(node.length, at + wanted.length));
      ranges.push(range);
    }
  }
  CSS.highlights.set("found", new Highlight(...ranges));
}

/** Scroll to the next turn that failed or was cut, and mark it; after the last one to the first. */
function nextTrouble() {
  const troubles = [...document.querySelectorAll(".failed, .cut")];
  const here = troubles.findIndex((element) => element.classList.contains("reached"));
  troubles[here]?.classList.remove("reached");
  const next = troubles[(here + 1) % troubles.length];
  next?.classList.add("reached");
  next?.scrollIntoView({ block: "start" });
}

/** Move the focus by `step` among the elements marked with the class "stop". */
function moveFocus(step) {
  const stops = [...document.querySelectorAll(".stop")].filter((element) => element.offsetParent !== null);
  if (!stops.length) return;
  const place = stops.indexOf(document.activeElement);
  const next = place < 0 ? (step > 0 ? 0 : stops.length - 1) : place + step;
  stops[Math.min(stops.length - 1, Math.max(0, next))].focus();
}
