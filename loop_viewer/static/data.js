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

/** Addresses are relative: those of a run in a folder begin with its own. */
const api = {
  run: () => fetchData("run", "api/run"),
  curves: (quantity, names) => fetchData("", `api/curves/${quantity}?${new URLSearchParams(names.map((name) => ["run", name]))}`),
  summaries: (id) => fetchData(`collection/${id}`, `api/collections/${encodeURIComponent(id)}`),
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
      const rollout = await api.rollout(id, entry.cursor);
      const ids = `${rollout.task_id}\n${rollout.rollout_id}\n${entry.note}`.toLowerCase();
      if (ids.includes(wanted) || rollout.messages.some((message) => `${message.content}\n${message.reasoning ?? ""}`.toLowerCase().includes(wanted))) found.push(entry.cursor);
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

/** Turns of a rollout's episode that another rollout sampled. */
const turnsBefore = (rollout) => (rollout.branch_of ? rollout.branch_of.turns : 0);

const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(100 * value)}%`);
/** With so many digits; what they round to nothing is 0, not -0. */
const fixed = (value, digits = 3) => (value === null || value === undefined ? "–" : value.toFixed(digits).replace(/^-(0\.?0*)$/, "$1"));
const signed = (value) => (value > 0.005 ? "+" : "") + fixed(value, 2);
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

/** What follows ? in the address, as {name: value}. */
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
