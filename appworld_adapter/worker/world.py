"""The world process: one per episode, holds the apps' databases and answers API requests; runs no agent code.

Agent code runs in a sibling (interpreter.py) whose only way to the databases is to send, over one socket, the HTTP
requests that its ``apis.<app>.<api>(...)`` calls come down to. The seam is the engine's own: the transport under
Starlette's TestClient. So the agent can change only the data that the apps' APIs let it change.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import clock
import databases
import httpx
import orjson
import sandbox
from appworld import AppWorld, environment, requester, update_root
from appworld.apps import get_all_apps
from appworld.apps.model_lib import CachedDBHandler
from appworld.apps.supervisor import models as supervisor_models
from appworld.common.utils import import_apis_module
from appworld.task import Task
from channel import Channel, ChannelClosed, wait_readable
from fastapi.testclient import TestClient
from fastapi_login.secrets import to_secret
from interpreter_server import InterpreterServer

MESSAGE_LIMIT = 500

WARM_UP_CODE = (
    "print(apis.api_docs.show_app_descriptions())",
    "print(apis.api_docs.show_api_descriptions(app_name='supervisor'))",
    "print(apis.supervisor.show_active_task())",
    # An app's first call has the documentation of all its APIs made, to know their paths.
    *(
        f"apis.{app}.login(username='nobody@example.com', password='wrong')"
        for app in get_all_apps(skip_admin=True, skip_api_docs=True, skip_supervisor=True)
    ),
    "apis.spotify.show_playlist_library(access_token='wrong')",
    "for",
    "import os, string, uuid, yaml, textwrap, pprint, difflib, heapq, bisect, statistics\n",
    "print(pendulum.now('America/New_York').add(days=1).isoformat(), DateTime.now().strftime('%A'), 1 / 0)",
)
"""Programs that run once in the warm parent, so that children inherit the modules which they import."""


class WorldServer:
    """The operations of a world server's children."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        update_root(settings["root"])

    @property
    def helper(self) -> InterpreterServer:
        """The interpreter server, without which this server cannot work."""
        return self._interpreters

    def warm_up(self, task_id: str) -> dict[str, Any]:
        """Fork the interpreter server; then make, use and close one world, and load what all worlds share."""
        sandbox.undumpable()
        self._settings["sandbox"]["level"] = sandbox.probe()
        options = self._world_options("warm-up")
        self._interpreters = InterpreterServer(self._settings, task_id, options, WARM_UP_CODE)
        world = AppWorld(task_id, **options)
        for code in WARM_UP_CODE:
            world.execute(code)
        (apps,) = requester.Requester.clients
        outputs = world.base_output_directory
        world.close()
        AppWorld.close_all()
        shutil.rmtree(outputs, ignore_errors=True)
        databases.forget()
        clock.freeze()
        databases.preload(copies=1)
        # Each child would build an app of its own, and its middleware at the first request.
        main_app = requester.build_main_app(apps)
        with TestClient(main_app) as client:
            client.get("/")
        requester.build_main_app = lambda apps: main_app
        self._interpreters.wait_until_warm()
        landlock = sandbox.landlock_abi()
        readable = sandbox.readable_folders() if landlock else []
        level = self._settings["sandbox"]["level"]
        if level == "seccomp" and self._settings["contained"]:
            level = "bubblewrap"
        return {"level": level, "landlock": landlock, "readable": readable}

    def _world_options(self, experiment: str) -> dict[str, Any]:
        return {
            "experiment_name": experiment,
            "load_ground_truth": False,
            "raise_on_unsafe_syntax": not self._settings["paper_parity"],
            "timeout_seconds": int(self._settings["execute_timeout_s"]),
        }

    def serve(self, owner: Channel) -> None:
        """Serve an episode: fork an interpreter, bring up the world, then execute code until the owner hangs up."""
        start = owner.receive()
        options = self._world_options(start["experiment"])
        interpreter = self._interpreters.ask(start["task_id"], options)
        world = ApiWorld(start["task_id"], self._settings["state_limit"], **options)
        episode = WorldEpisode(owner, interpreter, world, self._settings["output_limit"], self._settings["keep_logs"])
        if start.get("token_secret"):
            set_token_secret(start["token_secret"])
        # Agent code can fill databases through APIs.
        sandbox.limit_memory(self._settings["sandbox"]["memory_mb"])
        sandbox.limit_files(self._settings["state_limit"])
        episode.run()


class WorldEpisode:
    """The loop of a world process. Any message from the interpreter may have been written by agent code."""

    def __init__(
        self, owner: Channel, interpreter: Channel, world: ApiWorld, output_limit: int, keep_logs: bool
    ) -> None:
        self._owner = owner
        self._interpreter = interpreter
        self._world = world
        self._output_limit = output_limit
        self._keep_logs = keep_logs
        self._process: int | None = None
        """Descriptor of the interpreter's process, which stands still between two programs."""

    def run(self) -> None:
        """Serve the owner until it hangs up, has had the last state saved, or a program has broken this world.

        The answer to ``{"code": ...}`` is ``{"ok": true, "output", "completed"}``, or ``{"ok": false, "message",
        "saved"}`` if the program ended its interpreter or broke something else. This world is then at its end;
        ``saved`` says whether the saved state holds all that the program did, ``no_room`` that the disk is full.
        The answer to ``{"end": true}``, at any time, is ``{"ended": true, "message", "saved"}``.
        """
        try:
            pid = self._await_interpreter("ready")
        except InterpreterDied as error:
            self._owner.send({"ok": False, "message": str(error)})
            return
        with contextlib.suppress(OSError):  # Linux before 5.3: it then only may not speak
            self._process = os.pidfd_open(pid)
        self._owner.send({"ok": True})
        try:
            while not (message := self._owner.receive()).get("end"):
                answer = self._execute(message["code"])
                self._owner.send(answer)
                if not answer["ok"]:
                    return
        except EndOfEpisode:
            pass
        self._owner.send({"ended": True, **self._last_save()})

    def _execute(self, code: str) -> dict[str, Any]:
        try:
            if wait_readable([self._interpreter], longest_ms=0):  # an earlier program forged its output, and went on
                raise InterpreterDied("it spoke out of turn")
            self._signal(signal.SIGCONT)
            self._send_interpreter({"code": code})
            output = str(self._await_interpreter("output"))[: self._output_limit]
            self._signal(signal.SIGSTOP)
            output = output.encode("utf-8", "replace").decode()  # lone surrogates, which nothing downstream accepts
            self._world.save()
            if self._keep_logs:
                self._world.log(code, output)
            return {"ok": True, "output": output, "completed": self._world.task_completed()}
        except (ChannelClosed, EndOfEpisode):  # the owner ended it
            raise
        except BaseException as error:  # any other error here counts as the program's
            saved = _unsaved(error) if _no_room(error) else self._last_save()
            return {"ok": False, **saved, "message": saved["message"] or _described(error)}

    def _signal(self, number: int) -> None:
        if self._process is not None:
            signal.pidfd_send_signal(self._process, number)

    def _last_save(self) -> dict[str, Any]:
        try:
            self._world.save()
        except BaseException as error:
            return _unsaved(error)
        return {"saved": True, "message": ""}

    def _send_interpreter(self, message: dict[str, Any]) -> None:
        try:
            self._interpreter.send(message)
        except ChannelClosed as error:
            raise InterpreterDied(f"it hung up: {error}") from error

    def _await_interpreter(self, key: str) -> Any:
        """Answer API requests until the interpreter sends ``key``.

        Raises:
            InterpreterDied: the interpreter ended, or broke the protocol.
            EndOfEpisode, ChannelClosed: the owner asks for the end, or hung up.
        """
        while True:
            if self._owner in wait_readable([self._owner, self._interpreter]):
                self._owner.receive()  # while the interpreter works the owner can only ask for the end
                raise EndOfEpisode
            try:
                message = self._interpreter.receive()
                if key in message:
                    return message[key]
                answer = {"id": message["id"], **self._world.answer(message["request"])}
                if self._keep_logs:
                    self._world.log_request(message["request"])
            except Exception as error:
                raise InterpreterDied(f"{type(error).__name__}: {error}") from error
            self._send_interpreter(answer)


def _unsaved(error: BaseException) -> dict[str, Any]:
    return {"saved": False, "no_room": _no_room(error), "message": _described(error)}


def _no_room(error: BaseException) -> bool:
    """Return whether the error says that the disk is full. (A state that is too large gives EFBIG instead.)"""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MESSAGE_LIMIT]


class EndOfEpisode(Exception):
    """The owner asks the world to save its state and will ask nothing more."""


class InterpreterDied(Exception):
    """The process that runs agent code ended, or broke the protocol."""


class _NoShell:
    """Stand in for the engine's IPython shell; a world process executes no code."""

    def __init__(self, config: Any) -> None:
        self.user_ns: dict[str, Any] = {}

    def run_cell(self, code: str) -> None:
        pass


def _input_state_path(task: Task) -> SimpleNamespace:
    """Replace ``Task.model_collection`` with its path, all that a world needs; avoids a second copy of the data."""
    return SimpleNamespace(from_db_home_path=task.models_from_db_home_path)


class ApiWorld:
    """An AppWorld without a shell: databases, clock and APIs."""

    def __init__(self, task_id: str, state_limit: int, **options: Any) -> None:
        self._state_limit = state_limit
        environment.InteractiveShellEmbed = _NoShell
        Task.model_collection = property(_input_state_path)
        self._prefixes = tuple(f"/{app}/" for app in get_all_apps(skip_admin=True))
        self._saved = 0
        self._changes = -1
        AppWorld.close_all = classmethod(lambda cls: None)  # nothing is open yet, and it would close what is inherited
        AppWorld._save_state = lambda world, directory: None  # done by save(), in one step
        self._world = AppWorld(task_id, **options)
        self._transport = self._world.requester.client._transport
        self.save()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the response to one HTTP request, or the exception that the app raised, as plain data."""
        message = httpx.Request(
            request["method"],
            request["url"],
            headers=[(str(name), str(value)) for name, value in request["headers"]],
            content=request["body"].encode("latin-1"),
        )
        # The engine serves more than the apps: /dbs replaces databases, /seed and /date_time change what all worlds
        # hold fixed, and the admin app is the bank's own side. Agents must reach none of these.
        path = unquote(message.url.path)
        if not path.startswith(self._prefixes):
            name = path.lstrip("/").partition("/")[0]
            return {"status": 404, "headers": [], "body": json.dumps({"message": f"No app named '{name}' found."})}
        try:
            response = self._transport.handle_request(message)
        except Exception as error:
            kind = type(error)
            return {"raised": {"module": kind.__module__, "name": kind.__qualname__, "text": str(error)}}
        return {
            "status": response.status_code,
            "headers": list(response.headers.multi_items()),
            "body": response.read().decode("latin-1"),
        }

    def task_completed(self) -> bool:
        """Return whether the agent ended its task. (The engine's own request for this fails if the answer is NaN.)"""
        (task,) = supervisor_models.Task.all()
        return task.status is not None

    def log_request(self, request: dict[str, Any]) -> None:
        """Note a request that was answered, for :meth:`log`."""
        entry = {"method": request["method"].lower(), "url": request["url"], "data": request["body"]}
        self._world.requester.request_tracker.requests.append(entry)

    def log(self, code: str, output: str) -> None:
        """Add a program, its output and the requests it made to the logs that the engine would have written."""
        self._world.environment_io.append({"input": code, "output": output.rstrip()})
        self._world.save_logs()

    def save(self) -> None:
        """Write the state to disk in one step: readers, also after a kill at any moment, find the old or the new state.

        Raises:
            OSError: the state is larger than the limit, or the disk is full.
        """
        trackers = [tracker for _, tracker in CachedDBHandler.cache.values()]
        changes = sum(len(tracker.changes) for tracker in trackers)
        if changes == self._changes:
            return
        # A line for each change, as the engine writes them.
        size = sum(len(orjson.dumps(change)) + 1 for tracker in trackers for change in tracker.changes)
        if size > self._state_limit:
            raise OSError(errno.EFBIG, f"{os.strerror(errno.EFBIG)}: a state of {size >> 20} MiB")
        link = self._world.output_db_home_path_on_disk
        self._saved += 1
        fresh = f"{link}-{os.getpid()}-{self._saved}"  # a world that takes the place of a dead one has a new pid
        try:
            _save_state(self._world, fresh)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        if os.path.islink(link):
            previous = os.path.join(os.path.dirname(link), os.readlink(link))
        else:
            previous = fresh
            shutil.rmtree(link, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{link}.new")  # left by a world that was killed at this very point
        os.symlink(os.path.basename(fresh), f"{link}.new")
        os.replace(f"{link}.new", link)
        if previous != fresh:
            shutil.rmtree(previous, ignore_errors=True)
        self._changes = changes


_save_state = AppWorld._save_state


def set_token_secret(secret: str) -> None:
    """Sign log-in tokens with ``secret`` instead of the engine's constant, with which anyone can sign tokens."""
    for app in get_all_apps(skip_admin=True):
        manager = getattr(import_apis_module(app), "logging_manager", None)
        if manager is not None:
            manager.secret = to_secret({"algorithms": manager.algorithm, "secret": secret.encode()})
