"""The stock engine behind the same protocol: one ``appworld serve environment`` process per episode, over HTTP.

For comparison and for checking the forked worlds against. It runs agent code in the process that holds the databases,
under the engine's own guard only: use it where the agent is trusted. The reward still comes from the separate grader,
and the server's root still has no ground truth in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from agent_environments.lost_worlds import Loss, WorldLost
from agent_environments.protocol import EnvironmentCrashed
from appworld_adapter.pool.episode import KILL_GRACE_S, Execution
from appworld_adapter.pool.forked import AppWorldPool, environment_of
from appworld_adapter.prompt import TaskCard
from rollout_server.inference.server import free_port

logger = logging.getLogger(__name__)

START_SERVER_TIMEOUT_S = 180.0


@dataclass
class StockServer:
    """One ``appworld serve environment`` process."""

    process: asyncio.subprocess.Process
    url: str

    async def post(self, method: str, timeout_s: float, **arguments: Any) -> Any:
        """The ``output`` of a call. EnvironmentCrashed on any answer but 200, which a server may not survive sane."""
        return await asyncio.to_thread(self._post, method, timeout_s, arguments)

    def _post(self, method: str, timeout_s: float, arguments: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self.url}/{method}", json.dumps(arguments).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return json.load(response)["output"]
        except (OSError, ValueError, KeyError) as error:
            raise EnvironmentCrashed(f"the stock server failed at {method}: {error}") from error

    async def end(self) -> None:
        """Kill it with everything its agent's code may have started."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


class HttpWorld:
    """The world that a stock server holds until the next one is initialized in it; it takes a ForkedWorld's place."""

    def __init__(self, pool: HttpPool, server: StockServer, task_id: str) -> None:
        self._pool = pool
        self._server = server
        self._task_id = task_id
        self._usable = True

    async def execute(self, code: str) -> Execution:
        self._usable, timeout_s = False, self._pool.execute_timeout_s + 2 * KILL_GRACE_S
        try:
            output = await self._server.post("execute", timeout_s, task_id=self._task_id, code=code)
            completed = await self._server.post("task_completed", timeout_s, task_id=self._task_id)
        except EnvironmentCrashed as error:
            raise WorldLost(str(error), Loss.CUT) from error
        self._usable = True
        return Execution(output, bool(completed))

    async def settle(self) -> str | None:
        """The engine saves when a program has ended, so what one that was cut short did is not saved."""
        return "the stock server was stopped in the middle of a program"

    async def give_back(self) -> None:
        await self._pool.recycle(self._server, self._usable)


class HttpPool(AppWorldPool):
    """Stock servers, started as they are needed and used again for the next episode; options of :class:`AppWorldPool`.

    A server that answered with an error, was cut short or died is ended and not used again.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._idle: list[StockServer] = []
        self._all: list[StockServer] = []

    async def _open_worlds(self) -> None:
        self._idle.append(await self._start_server())

    async def _start_server(self) -> StockServer:
        port = free_port()
        run = self.run_folder
        # Its parent's death ends it: the wrapper asks the kernel for that, and binds the server to loopback.
        program = (
            "import ctypes, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL); import uvicorn;"
            "from appworld.serve.environment import app;"
            f"uvicorn.run(app, host='127.0.0.1', port={port}, log_level='warning')"
        )
        log = await asyncio.to_thread(open, run.path / "stock.log", "ab")
        with log:
            process = await asyncio.create_subprocess_exec(
                self._python,
                "-c",
                program,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment_of(run.agent),
                cwd=run.path,
            )
        server = StockServer(process, f"http://127.0.0.1:{port}")
        self._all.append(server)
        try:
            async with asyncio.timeout(START_SERVER_TIMEOUT_S):
                while not await asyncio.to_thread(_answers, server.url):
                    if process.returncode is not None:
                        raise EnvironmentCrashed(f"the stock server ended as it started: see {run.path}/stock.log")
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            await server.end()
            raise EnvironmentCrashed(f"the stock server was not up after {START_SERVER_TIMEOUT_S:.0f} s") from error
        return server

    async def _bring_up(self, card: TaskCard, experiment: str) -> Any:  # an HttpWorld, which is no process
        server = self._idle.pop() if self._idle else await self._start_server()
        try:
            await server.post(
                "initialize",
                START_SERVER_TIMEOUT_S,
                task_id=card.task_id,
                experiment_name=experiment,
                load_ground_truth=False,
                raise_on_unsafe_syntax=not self._paper_parity,
                timeout_seconds=int(self.execute_timeout_s),
            )
        except BaseException:
            await self.recycle(server, usable=False)
            raise
        return HttpWorld(self, server, card.task_id)

    async def recycle(self, server: StockServer, usable: bool) -> None:
        """Keep a server for the next episode, or end it."""
        if usable and server.process.returncode is None and not self._closing:
            self._idle.append(server)
            return
        self._all.remove(server)
        await server.end()

    async def close(self) -> None:
        await super().close()
        for server in list(self._all):
            await server.end()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5.0):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
