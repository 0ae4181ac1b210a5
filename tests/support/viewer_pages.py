"""A page of the viewer in a real browser: opened on a folder, waited for, and asked what it says."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp.test_utils import TestServer
from playwright.async_api import Browser, Page

from loop_recipes.verbs import continuation
from loop_recipes.verbs.view import open_runs
from loop_viewer.app import build_app
from support.browser import open_page, true_in


@asynccontextmanager
async def viewing(
    browser: Browser, folder: Path, *middlewares: object, phone: bool = False
) -> AsyncIterator[tuple[Page, str]]:
    """(page, address of the viewer) of a run's folder, or of a folder of runs."""
    app = build_app(open_runs([folder]), continuation)
    app.middlewares.extend(middlewares)
    async with TestServer(app) as server, open_page(browser, phone) as page:
        yield page, str(server.make_url("/"))


async def screenshot(page: Page, name: str) -> None:
    """Keep what is shown, for whoever wants to look at it."""
    if "SCREENSHOTS" in os.environ:
        await page.screenshot(path=f"{os.environ['SCREENSHOTS']}/{name}.png")


async def says(page: Page, selector: str, text: str) -> None:
    """Wait until the first of ``selector`` shows ``text``: a message that was not in view yet has no inner text."""
    shown = f"(each => each && (each.scrollIntoView(), each.innerText.includes({json.dumps(text)})))"
    await true_in(page, f"{shown}(document.querySelector({json.dumps(selector)}))")


async def show(page: Page, address: str, hash_: str = "", ready: str = "main section") -> None:
    """Open a page of the viewer and wait until it holds what ``ready`` selects."""
    await page.goto("about:blank")
    await page.goto(f"{address}#/{hash_}")
    await page.locator(ready).first.wait_for(state="attached")
