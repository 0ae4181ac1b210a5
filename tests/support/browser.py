"""Playwright on a Chromium that is installed already: for tests of pages."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, Page, async_playwright

from support.waiting import DEADLINE_S

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
IN_A_BROWSER = [
    pytest.mark.integration,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        EXECUTABLE is None, reason="needs a browser: chromium, chromium-browser or google-chrome on the PATH"
    ),
]
"""The marks of a file of tests that share a browser."""
DESKTOP, PHONE = (1280, 900), (390, 844)


@contextlib.asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    """A headless browser, for many pages: starting one takes seconds."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=EXECUTABLE, timeout=1000 * DEADLINE_S)
        yield browser
        await browser.close()


@contextlib.asynccontextmanager
async def open_page(browser: Browser, phone: bool = False) -> AsyncIterator[Page]:
    """A blank page that shares nothing with the browser's others.

    At the end the test fails if the page ever raised an exception, logged an error or violated its security policy.
    """
    problems: list[str] = []
    width, height = PHONE if phone else DESKTOP
    context = await browser.new_context(viewport={"width": width, "height": height}, is_mobile=phone)
    context.set_default_timeout(1000 * DEADLINE_S)
    page = await context.new_page()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    yield page
    await context.close()
    assert problems == []


async def true_in(page: Page, expression: str) -> None:
    """Return when a JavaScript expression is true; fails the test after the deadline.

    Playwright's own ``wait_for_function`` evaluates text inside the page, which the viewer's security policy forbids.
    """
    give_up = time.monotonic() + DEADLINE_S
    while not await page.evaluate(expression):
        assert time.monotonic() < give_up, f"never true: {expression}"
        await asyncio.sleep(0.05)
