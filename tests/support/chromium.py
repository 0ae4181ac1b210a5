"""A headless Chromium driven over its DevTools protocol, with nothing but aiohttp: for tests of pages."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
START_DEADLINE_S = 60.0
CALL_DEADLINE_S = 60.0

_KEY_CODES = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "ArrowUp": 38, "Home": 36, "End": 35, "Enter": 13}


class Page:
    """One tab. ``problems`` collects uncaught exceptions, errors logged by the page and violations of its policy."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future] = {}
        self.problems: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            data = message.json()
            if "id" in data:
                future = self._waiting.pop(data["id"])
                if not future.done():
                    future.set_result(data)
            elif data["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(data["params"]["exceptionDetails"])[:500])
            elif data["method"] == "Log.entryAdded" and data["params"]["entry"]["level"] == "error":
                self.problems.append(str(data["params"]["entry"])[:500])

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(future, CALL_DEADLINE_S)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        result = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    async def wait_for(self, expression: str, deadline_s: float = 30.0) -> Any:
        """Evaluate until it is truthy; returns the value."""
        value = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while not (value := await self.evaluate(expression)):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                return value
        raise AssertionError(f"never true: {expression}; problems: {self.problems}")

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.wait_for("document.readyState === 'complete'")

    async def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = {"windowsVirtualKeyCode": _KEY_CODES[key]} if key in _KEY_CODES else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **code)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    async def resize(self, width: int, height: int, phone: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )

    async def screenshot(self, file: Path) -> None:
        data = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(file.write_bytes, base64.b64decode(data["data"]))


@contextlib.asynccontextmanager
async def open_page() -> AsyncIterator[Page]:
    """Start a browser of our own, give a blank page, end the browser."""
    profile = tempfile.mkdtemp(prefix="chromium-")
    process = await asyncio.create_subprocess_exec(
        str(EXECUTABLE),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--hide-scrollbars",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(START_DEADLINE_S):
            port_file = Path(profile) / "DevToolsActivePort"
            while not port_file.exists() or "\n" not in port_file.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        port = port_file.read_text().split("\n")[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                target = next(item for item in await answer.json() if item["type"] == "page")
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                yield page
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()
        shutil.rmtree(profile, ignore_errors=True)
