"""The viewer's pages as axe-core judges them: names, roles, contrast, order of headings.

Skipped, with the reason, where no Chromium is installed, or no axe-core.
"""

import shutil
from pathlib import Path

import pytest

from support.browser import IN_A_BROWSER, true_in
from support.viewer_pages import show

axe = pytest.importorskip("axe_playwright_python", reason="needs axe-playwright-python, of the extra dev")
pytestmark = IN_A_BROWSER
AXE = Path(axe.__file__).with_name("axe.min.js")
PAGES = {
    "run": ("", ".curve canvas"),
    "tasks": ("c/demo-i0001", ".cell"),
    "rollouts": ("c/demo-i0001?order=reward", "tbody a"),
    "task": ("c/demo-i0001/t/task0_1", ".column .output"),
    "everywhere": ("everywhere/task0_1", ".everywhere .cell"),
    "rollout": ("c/demo-i0001/r/1", ".conversation .output"),
    "tokens": ("c/demo-i0001/r/1/tokens", ".tokens .token"),
    "against": ("against/demo-i0001/demo-i0002", "#gained"),
    "beside": ("beside/demo-i0001/1/demo-i0001/2", ".beside .turn"),
}


async def violations(page):
    """What axe-core finds, in a line each: the rule, and the first element."""
    await page.evaluate(f"{AXE.read_text(encoding='utf-8')}; undefined")
    found = await page.evaluate(
        "axe.run().then(({violations}) => violations.map(({id, nodes}) => [id, nodes[0].html]))"
    )
    return [f"{rule}: {element[:200]}" for rule, element in found]


@pytest.mark.fault("in forced colours the legends of charts and tokens had none, and lines that differ no mark")
async def test_forced_colours_leave_those_that_say_something(run_folder, viewing):
    telling = {"": ["tr + tr .u-marker"], "beside/demo-i0001/1/demo-i0001/4": [".differs"]}
    telling["c/demo-i0001/r/1/tokens"] = [".legend .s4", ".tokens .s4", ".strip .red"]
    async with viewing(run_folder) as (page, address):
        await page.emulate_media(forced_colors="active")
        for hash_, places in telling.items():
            for place in places:
                await show(page, address, hash_, place)
                style = f"getComputedStyle(document.querySelector('{place}'))"
                assert await page.evaluate(f"{style}.backgroundColor") != "rgb(255, 255, 255)", place


@pytest.mark.fault(
    "a reader by ear or by keys met elements without names, pages without headings, text without contrast"
)
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing(run_folder, tmp_path, scheme, viewing):
    found = {}
    async with viewing(run_folder) as (page, address):
        await page.emulate_media(color_scheme=scheme)
        for name, (hash_, ready) in PAGES.items():
            await show(page, address, hash_, ready)
            found[name] = await violations(page)
        await page.keyboard.press("?")
        await true_in(page, "document.querySelector('dialog[open]') !== null")
        found["help"] = await violations(page)
        await page.keyboard.press("2")
        assert await page.evaluate("location.hash.startsWith('#/beside')"), "a key worked behind the help"
        await page.keyboard.press("Escape")
        await true_in(page, "document.querySelector('dialog') === null")
    shutil.copytree(run_folder, tmp_path / "runs/a")
    async with viewing(tmp_path / "runs") as (page, address):
        await page.emulate_media(color_scheme=scheme)
        await show(page, address, ready="#runs")
        found["folder"] = await violations(page)
    assert {name: said for name, said in found.items() if said} == {}
