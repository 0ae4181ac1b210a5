"""The interpreter process: runs one episode's agent code, and holds nothing worth taking.

It has the engine's own shell, guard, tracebacks and API client, but no databases: the transport under the API client
sends each request to the world process. After :func:`run_interpreter` has set up the engine it drops, for good, the
rights that agent code does not need (sandbox.py).
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from types import SimpleNamespace
from typing import Any

import httpx
import IPython.utils.capture
import sandbox
from appworld import AppWorld, environment, requester
from appworld.common.utils import get_stack_trace_from_exception
from appworld.task import Task
from bounded_text import BoundedText
from channel import Channel, ChannelClosed
from fastapi.testclient import TestClient
from IPython.core.interactiveshell import InteractiveShell

_mask = signal.pthread_sigmask
_exit = os._exit


def run_interpreter(channel: Channel, task_id: str, options: dict[str, Any], settings: dict[str, Any]) -> None:
    """Run programs for the world process until it hangs up; never returns."""
    status = 1
    try:
        sandbox.die_with_parent()
        sandbox.close_descriptors_except({0, 1, 2, channel.descriptor})
        world = make_world(channel, task_id, options, settings["output_limit"])
        sandbox.confine(settings["sandbox"])
        channel.send({"ready": os.getpid()})
        while True:
            code = channel.receive()["code"]
            channel.send({"output": execute(world, code)[: settings["output_limit"]]})
    except ChannelClosed:
        status = 0
    finally:
        _exit(status)


def make_world(channel: Channel, task_id: str, options: dict[str, Any], output_limit: int) -> AppWorld:
    """Return the engine's world object without the parts that would touch a database."""

    IPython.utils.capture.StringIO = functools.partial(BoundedText, output_limit)  # observations show far less
    # The shell would keep a copy of all that is printed, for a history that nobody reads.
    InteractiveShell._tee = lambda shell, channel: contextlib.nullcontext()
    client = TestClient(_no_app)
    client._transport = PipeTransport(channel)
    requester.Requester._get_client = lambda self: client
    requester.set_local_dbs = lambda *args, **kwargs: None
    environment.ModelCollection = SimpleNamespace(load=lambda **kwargs: None)
    Task.model_collection = property(lambda task: SimpleNamespace(from_db_home_path=task.models_from_db_home_path))
    for name in ("_prepare_directories", "save_logs"):
        setattr(AppWorld, name, lambda world: None)
    AppWorld._save_state = lambda world, directory: None
    return AppWorld(task_id, **options)


async def _no_app(scope: Any, receive: Any, send: Any) -> None:
    raise RuntimeError("requests go through the transport")


def execute(world: AppWorld, code: str) -> str:
    """Run ``world.execute(code)``; also handle errors that the engine does not catch, such as KeyboardInterrupt."""
    try:
        return world.execute(code)
    except BaseException as error:
        world.safety_guard.disable()
        lines = get_stack_trace_from_exception(error, only_ipython=True).splitlines()
        return "Execution failed. Traceback:\n" + (lines[-1] if lines else type(error).__name__)


class PipeTransport(httpx.BaseTransport):
    """Send requests to the world process. Requests have numbers, because the engine's alarm may cut a request short."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._number = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._number += 1
        number = self._number
        message = {
            "method": request.method,
            "url": str(request.url),
            "headers": request.headers.multi_items(),
            "body": request.read().decode("latin-1"),
        }
        _mask(signal.SIG_BLOCK, {signal.SIGALRM})  # half a message would end the episode
        try:
            self._channel.send({"id": number, "request": message})
        finally:
            _mask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        while (answer := self._channel.receive()).get("id") != number:
            pass
        if "raised" in answer:
            raised = answer["raised"]
            raise type(raised["name"], (Exception,), {"__module__": raised["module"]})(raised["text"])
        return httpx.Response(
            answer["status"],
            headers=[tuple(header) for header in answer["headers"]],
            stream=httpx.ByteStream(answer["body"].encode("latin-1")),
            request=request,
        )
