"""How long `loop view` takes until a list of many rollouts is there.

    python benchmarks/viewer.py [--json results.json] [--rollouts 20000]

Two logs are made up in a temporary folder: ``small`` has rollouts of 100 tokens, ``large`` has as many of a demo's
size: 840 tokens, of which 200 are sampled. Each is opened as the viewer opens it: the folder, the run's
page, and the list of the collection, which reads every line. ``again`` is the list asked for a second time, as a page
does that follows a run. Seconds by the clock and of the processor (``cpu``), and the log's size in MB.

``browser`` are seconds of the processor, of all processes of a Chromium that shows the page: until the ``list`` is
drawn, beyond what a page without rollouts costs; then for a new ``order``, the order the other ``way``, a ``search``
and a ``scroll`` to the end. Ends with 1 where one of them takes more than ``--most``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from aiohttp import web
from playwright.async_api import CDPSession, Page, async_playwright

from loop_formats.run_files import COLLECTIONS, log_path
from loop_viewer.app import build_app
from loop_viewer.run_data import RunData

SIZES = {"small": (100, 1), "large": (840, 4)}
"""Tokens and turns of a rollout."""
DISTINCT = 50
"""Rollouts that are made; the log repeats them under ids of their own."""
NAME = "bench-i0001"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
SETTLED_S = 1.5
"""A page is measured until so long after what was asked for is drawn: a browser goes on for a while."""


def made_up(tokens: int, turns: int, rng: random.Random) -> dict[str, Any]:
    """Make a rollout whose turns have a quarter of its tokens, with some text around them."""
    each, sampled = tokens // turns, tokens // turns // 4
    spans = [((place + 1) * each - sampled, (place + 1) * each) for place in range(turns)]
    mask = [any(start <= i < end for start, end in spans) for i in range(tokens)]
    text = " ".join(rng.choice(("print", "apis", "answer", "'Ada'", "note", "7")) for _ in range(each // 3))
    messages = [{"role": "user", "content": f"Task: {text}"}]
    for _ in range(turns):
        messages.append({"role": "assistant", "content": f"I look.\n```python\nprint(apis.a.b())\n{text}\n```"})
        messages.append({"role": "user", "content": text})
    turn = {"policy_version": 0, "finish_reason": "stop", "server": "s", "failed": False, "reward": None}
    seconds = {"sampling_seconds": 0.5, "environment_seconds": 0.1}
    return {
        **{"attempt": 0, "seed": 0, "dataset": "made-up", "reward": 0.5, "success": False, "end_reason": "completed"},
        **{"branch_of": None, "segment": 0, "segments": 1, "ungradable": None, "extra": {}},
        **{"temperature": 1.0, "seconds": 2.5, "requirements": [], "messages": messages, "mask": mask},
        "token_ids": [rng.randrange(150_000) for _ in range(tokens)],
        "sampler_logprobs": [-rng.expovariate(2.0) if each else 0.0 for each in mask],
        "turns": [
            {**turn, **seconds, "start": start, "end": end, "message": 1 + 2 * place}
            for place, (start, end) in enumerate(spans)
        ],
    }


def write_log(log: Path, rollouts: int, tokens: int, turns: int) -> None:
    """Write the log of that many rollouts, eight to a task."""
    rng = random.Random(0)
    kinds = [json.dumps(made_up(tokens, turns, rng), separators=(",", ":"))[1:] for _ in range(DISTINCT)]
    log.parent.mkdir(parents=True)
    with log.open("w", encoding="utf-8") as file:
        for number in range(rollouts):
            task, index = f"task{number // 8}", number % 8
            name = f"{NAME}/{task}/{index}.0"
            own = {"rollout_id": name, "episode_id": name, "collection_id": NAME, "task_id": task, "index": index}
            file.write(f"{json.dumps(own)[:-1]},{kinds[number % DISTINCT]}\n")


def measured(folder: Path, rollouts: int) -> dict[str, float]:
    """Open the run in ``folder`` and list its rollouts."""
    clock, cpu = time.perf_counter(), time.process_time()
    run = RunData(folder)
    run.overview()
    entries = run.summaries(NAME)
    result = {"seconds": time.perf_counter() - clock, "cpu": time.process_time() - cpu}
    clock = time.perf_counter()
    run.overview(), run.summaries(NAME)
    result["again"] = time.perf_counter() - clock
    assert len(entries) == rollouts, f"{len(entries)} rollouts are listed"
    return result


async def in_browser(folder: Path, rollouts: int) -> dict[str, float]:
    """Measure the processor's seconds that a browser takes for a page, by the action on it."""
    runner = web.AppRunner(build_app(RunData(folder)))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}/#/c/"
    async with async_playwright() as playwright:
        executable = next(filter(None, map(shutil.which, CHROMIUM)))
        browser = await playwright.chromium.launch(executable_path=executable)
        system = await browser.new_browser_cdp_session()
        page = await browser.new_page()
        page.set_default_timeout(600_000)
        await page.goto(f"{address}none")  # what a browser does once is not measured
        await _settle(page, ".error", "none")
        figures = {}
        for name, collection, text in (("empty", "none", "none"), ("list", NAME, f"{rollouts} of {rollouts}")):
            await page.goto("about:blank")
            before = await _cpu(system)
            await page.goto(f"{address}{collection}")
            await _settle(page, ".error, #shown", text)
            figures[name] = await _cpu(system) - before
        figures["list"] -= figures["empty"]
        before = await _cpu(system)
        await page.get_by_label("order").select_option("tokens")
        await _settle(page, "th[aria-sort=descending]", "tokens")
        figures["order"] = await _cpu(system) - before
        before = await _cpu(system)
        await page.get_by_role("button", name="reverse").click()
        await _settle(page, "th[aria-sort=ascending]", "tokens")
        figures["way"] = await _cpu(system) - before
        before = await _cpu(system)
        await page.locator("input[type=search]").fill("task7")
        await _settle(page, "#shown", f" of {rollouts}", f"{rollouts} of")
        figures["search"] = await _cpu(system) - before
        await page.locator("input[type=search]").fill("")
        await _settle(page, "#shown", f"{rollouts} of")
        before = await _cpu(system)
        await page.evaluate("scrollTo(0, document.body.scrollHeight)")
        await _settle(page, "#shown", f"{rollouts} of")
        figures["scroll"] = await _cpu(system) - before
        figures["elements"] = await page.evaluate("document.querySelectorAll('*').length")
        await browser.close()
    await runner.cleanup()
    return figures


async def _cpu(system: CDPSession) -> float:
    processes = await system.send("SystemInfo.getProcessInfo")
    return float(sum(process["cpuTime"] for process in processes["processInfo"]))


async def _settle(page: Page, selector: str, text: str, without: str = "\0") -> None:
    """Return a while after the first of ``selector`` says ``text``, and not ``without``."""
    await page.locator(selector).filter(has_text=text, has_not_text=without).first.wait_for()
    await page.wait_for_timeout(1000 * SETTLED_S)


def main() -> int:
    """Measure, print, and write what ``--json`` names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--most", type=float, default=0.4, help="seconds of a browser's processor, 0.4")
    parser.add_argument("--rollouts", type=int, default=20_000, help="in each log, 20000")
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    slow = False
    for name, (tokens, turns) in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            log = log_path(Path(folder) / "node" / COLLECTIONS, NAME)
            write_log(log, options.rollouts, tokens, turns)
            results[name] = {"megabytes": log.stat().st_size / 1e6, **measured(Path(folder), options.rollouts)}
            browser = asyncio.run(in_browser(Path(folder), options.rollouts))
        print(name, *(f"{key} {value:.2f}" for key, value in results[name].items()), flush=True)
        print(name, "browser:", *(f"{key} {value:.2f}" for key, value in browser.items()), flush=True)
        slow |= any(browser[each] > options.most for each in ("list", "order", "way", "search", "scroll"))
        results[name]["browser"] = browser
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
