// Address, live updates, head of the page and help.
"use strict";

const POLL_MS = 3000;

/** A part of the address as it is meant; as it stands where somebody typed it with a bare %. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** True if a part of the address is the place of a rollout in its log. */
const isCursor = (part) => /^\d{1,12}$/.test(part ?? "");

function readAddress() {
  const parts = location.hash.replace(/^#\/?/, "").replace(/\?.*/, "").split("/").filter(Boolean).map(decoded);
  if (parts[0] === "beside" && isCursor(parts[2]) && isCursor(parts[4])) {
    return { page: "beside", collection: parts[1], cursor: Number(parts[2]), other: { collection: parts[3], cursor: Number(parts[4]) } };
  }
  if (parts[0] === "against" && parts[2]) return { page: "against", collection: parts[1], other: parts[2] };
  if (parts[0] === "everywhere" && parts[1]) return { page: "everywhere", task: parts[1] };
  if (parts[0] !== "c" || !parts[1]) return { page: "run" };
  if (parts[2] === "t" && parts[3]) return { page: "task", collection: parts[1], task: parts[3] };
  if (parts[2] === "r" && isCursor(parts[3])) {
    const view = parts[4] === "tokens" ? "tokens" : "conversation";
    return { page: "rollout", collection: parts[1], cursor: Number(parts[3]), view };
  }
  return { page: "collection", collection: parts[1] };
}

const KEYS = [
  ["j / k", "next, previous item; scroll in a conversation"],
  ["Enter", "open the focused item"],
  ["u", "up: to the task, the collection, the run, the folder"],
  ["[ / ]", "previous, next rollout of the list, as it is filtered and ordered"],
  ["1 / 2", "conversation, tokens"],
  ["← →", "previous, next token"],
  ["↑ ↓", "previous, next turn (tokens)"],
  ["Home / End", "first, last token"],
  ["e", "next turn that failed or was cut"],
  ["f", "next filter"],
  ["/", "search for a text or an id"],
  ["n", "next rollout with the searched text, of any iteration"],
  ["?", "this help"],
];

function Help({ onClose }) {
  const dialog = useRef(null);
  useEffect(() => dialog.current.showModal(), []);
  return html`<dialog class="help" ref=${dialog} onClose=${onClose} onClick=${onClose} aria-labelledby="keys">
    <h2 id="keys">Keys</h2>
    <dl>${KEYS.map(([key, meaning]) => html`<dt><kbd>${key}</kbd></dt><dd>${meaning}</dd>`)}</dl>
    <button onClick=${onClose}>close</button>
  </dialog>`;
}

function Crumbs({ address, run, shown }) {
  const { page, collection } = address;
  const item = run.collections.find((entry) => entry.id === collection);
  const name = item ? item.name : collection;
  return html`<nav class="crumbs" aria-label="path">
    ${run.folder && html`<a href=${TO_FOLDER}><bdi>${run.folder}</bdi></a> › `}<a href="#/"><bdi>${run.name}</bdi></a>
    ${collection && html` › <a href=${link("c", collection)}><bdi>${name}</bdi></a>`}
    ${page === "task" && html` › <bdi>${address.task}</bdi>`}
    ${page === "everywhere" && html` › <bdi>${address.task}</bdi> ${EVERYWHERE}`}
    ${page === "rollout" && shown.cursor === address.cursor && html` › <a href=${link("c", collection, "t", shown.task)}><bdi>${shown.task}</bdi></a> › rollout ${shown.index}`}
    ${page === "beside" && " › two rollouts"}
    ${page === "against" && " › two evaluations"}
  </nav>`;
}

function App() {
  const [address, setAddress] = useState(readAddress());
  const [help, setHelp] = useState(false);
  const [run, setRun] = useState(null);
  const [trouble, setTrouble] = useState("");
  const [shown, setShown] = useState({});

  useEffect(() => {
    const onChange = () => {
      setAddress(readAddress());
      scrollTo(0, 0);
    };
    addEventListener("hashchange", onChange);
    return () => removeEventListener("hashchange", onChange);
  }, []);

  useEffect(() => {
    let last = "";
    let timer = 0;
    const poll = async () => {
      try {
        const next = await api.run();
        const text = JSON.stringify(next);
        nodeRuns = Boolean(next.node_runs);
        if (text !== last) setRun(next);
        last = text;
        setTrouble("");
      } catch (error) {
        setTrouble(error instanceof TypeError ? `the viewer does not answer: ${error.message}` : error.message); // of fetch
      }
      if (!isExport) timer = setTimeout(poll, POLL_MS);
    };
    poll();
    return () => clearTimeout(timer);
  }, []);

  useKeys({ "?": () => setHelp((old) => !old) });

  const heading = useRef(null);
  useEffect(() => {
    const path = [...document.querySelectorAll(".crumbs")].flatMap((crumbs) => crumbs.textContent.split(" › "));
    const title = [...(address.view === "tokens" ? ["tokens"] : []), ...path.map((part) => part.trim()).reverse()].join(" – ");
    if (path.length) document.title = heading.current.textContent = title;
  });
  // Whoever reads by ear or by keys is at the beginning of the new page, and hears what it is.
  const place = location.hash.split("?")[0];
  const before = useRef(place);
  useEffect(() => {
    if (before.current !== place) heading.current?.focus({ preventScroll: true });
    before.current = place;
  }, [place]);
  useEffect(() => {
    let opened = [];
    const open = () => (opened = [...document.querySelectorAll("details:not([open])")]).forEach((each) => (each.open = true));
    const close = () => opened.forEach((each) => (each.open = false));
    addEventListener("beforeprint", open);
    addEventListener("afterprint", close);
    return () => (removeEventListener("beforeprint", open), removeEventListener("afterprint", close));
  }, []);

  if (!run) return html`<p class="quiet">${trouble || "loading …"}</p>`;
  if (run.runs) {
    const live = run.runs.filter((row) => row.runs).length;
    return html`<header>
        <nav class="crumbs" aria-label="path"><a href="#/"><bdi>${run.name}</bdi></a></nav>
        <span class=${`state ${live ? "live" : ""}`}>${trouble || `${run.runs.length} runs, ${live || "none"} at work`}</span>
        <button onClick=${() => setHelp(true)} aria-label="keys">?</button>
      </header>
      <main><h1 class="hidden" tabindex="-1" ref=${heading}></h1><${FolderPage} folder=${run} /></main>
      ${help && html`<${Help} onClose=${() => setHelp(false)} />`}`;
  }
  const item = run.collections.find((entry) => entry.id === address.collection);
  const common = { ...address, stamp: item ? `${item.bytes} ${run.metrics.length}` : "", key: address.collection, collections: run.collections };
  const live = run.head.runs && !isExport && !trouble;
  return html`<header>
      <${Crumbs} address=${address} run=${run} shown=${shown} />
      <span class=${`state ${live ? "live" : ""}`}>${trouble || `${isExport ? "exported: " : ""}${run.head.state}`}</span>
      <button onClick=${() => setHelp(true)} aria-label="keys">?</button>
    </header>
    ${run.no_text && html`<p class="quiet" id="no-text">${run.no_text}</p>`}
    ${run.shown_once && html`<p class="quiet">${run.shown_once}</p>`}
    <main>
      <h1 class="hidden" tabindex="-1" ref=${heading}></h1>
      ${address.page === "run" && html`<${RunPage} run=${run} />`}
      ${address.page === "collection" && html`<${CollectionPage} ...${common} failures=${item ? item.failures : {}} damage=${item?.damage} />`}
      ${address.page === "task" && html`<${TaskPage} ...${common} />`}
      ${address.page === "everywhere" && html`<${EverywherePage} key=${address.task} task=${address.task} run=${run} />`}
      ${address.page === "against" && html`<${AgainstPage} key=${address.other} ...${address} run=${run} />`}
      ${address.page === "beside" && html`<${BesidePage} ...${common} run=${run} />`}
      ${address.page === "rollout" && html`<${RolloutPage} ...${common} onShown=${setShown} />`}
    </main>
    ${help && html`<${Help} onClose=${() => setHelp(false)} />`}`;
}

render(html`<${App} />`, document.getElementById("app"));
