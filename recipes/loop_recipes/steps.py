"""Programs of several commands, such as collections and training runs in turn: each runs once, with an owner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import files
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from omegaconf import OmegaConf

from loop_formats.run_files import newest_adapter, write_whole
from loop_formats.run_folder import read_metrics
from loop_formats.schema import ConfigError, made_folder, require
from loop_plumbing import process_guard
from loop_recipes.exit_status import StoppedAsAsked

GRACE_S = 300.0
"""Seconds that a command has to save and to stop its node, after SIGTERM."""
LONGEST_UPDATE_S = 86_400
"""Seconds that a training has for the update in hand, after a request to end; a second request ends it sooner."""


class StepFailed(RuntimeError):
    """A command failed; the message is one line for the user."""


def on_ranks(count: int) -> list[str]:
    """Return the words with which `tune run` starts ``count`` ranks on this machine. They meet on loopback: the
    machine's own name need not resolve (containers, laptops). SIGTERM kills no rank that is still saving."""
    patience = ["--shutdown_timeout", str(LONGEST_UPDATE_S)]
    return ["--standalone", "--local_addr", "127.0.0.1", *patience, "--nproc_per_node", str(count)]


def tune(*words: str) -> list[str]:
    """Return the command ``tune`` of the imported torchtune. Its folder may differ from the interpreter's:
    `pip install --user` puts programs elsewhere."""
    recorded = [str(file.locate()) for file in files("torchtune") or () if file.name == "tune"]
    return [sys.executable, *(recorded[:1] or [str(Path(sys.executable).with_name("tune"))]), *words]


def module(name: str, *words: str) -> list[str]:
    """Return the command that runs a module of ours."""
    return [sys.executable, "-P", "-m", name, *words]


class Steps:
    """The commands of one program in one folder. ``steps.json`` lists the finished ones: whatever ends the program,
    started again it goes on with the first unfinished command.

    Args:
        options: values that the commands depend on, JSON-able.

    Raises:
        ConfigError: the folder was begun with other options, cannot be made, or its file is damaged.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        made_folder("the folder", folder)
        self._file = folder / "steps.json"
        state: dict[str, Any] = {"options": dict(options), "done": []}
        if self._file.exists():
            try:
                state = {**state, **json.loads(self._file.read_text(encoding="utf-8"))}
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{self._file} is damaged; remove it to begin again") from error
        other = [name for name in options if state["options"].get(name) != options[name]]
        require(not other, f"{folder} was begun with another {', '.join(other)}; give the same, or another folder")
        self._options, self.done = state["options"], list(state["done"])

    def run(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        training: Path | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """Run a command, unless it is done.

        Args:
            training: the output folder of a training run, which must have all its iterations at the end.
            deadline_s: seconds that it may take; None waits.

        Raises:
            StepFailed: names the step.
        """
        if name in self.done:
            return
        started = time.monotonic()
        print(f"{name} (output: {log})", flush=True)
        try:
            run_step(command, log, deadline_s)
            if training is not None:
                check_finished(training)
        except StepFailed as error:
            raise StepFailed(f"{name}: {error}") from error
        self.done.append(name)
        write_whole(self._file, json.dumps({"options": self._options, "done": self.done}, indent=1) + "\n")
        print(f"{name}: done in {time.monotonic() - started:.0f} s", flush=True)


def check_finished(run: Path) -> None:
    """Raise StepFailed unless a run has done all its iterations: one that was stopped also ends with status 0."""
    done, wanted = read_metrics(run)[-1]["iteration"], OmegaConf.load(run / "config.yaml").max_iterations
    if done < wanted:
        raise StepFailed(f"{run} was stopped after iteration {done} of {wanted}; the same command goes on from there")


def newest_policy(run: Path) -> Path:
    """Return the newest adapter that a training run exported; raise StepFailed where there is none."""
    adapter = newest_adapter(run)
    if adapter is None:
        raise StepFailed(f"{run} holds no policy")
    return adapter


def run_step(command: Sequence[str], log: Path | None, deadline_s: float | None = None) -> None:
    """Run ``command`` to its end; its output is appended to ``log``, or to this process's own if ``log`` is None. For
    the main thread.

    None of its processes outlives this one. When the deadline passes or this process is interrupted, they get SIGTERM,
    and SIGKILL after :data:`GRACE_S`, or after :data:`LONGEST_UPDATE_S` without a ``log``. Ctrl-C and SIGTERM reach
    this process alone, which passes each further one on.

    Raises:
        StepFailed: the command ended with another status than 0, or not before the deadline.
        KeyboardInterrupt: this process was interrupted, or got SIGTERM.
        StoppedAsAsked: the same, and the command on this terminal ended with status 0.
    """
    grace = GRACE_S if log else LONGEST_UPDATE_S
    guard = [sys.executable, "-I", process_guard.__file__, str(os.getpid()), str(grace)]
    with _opened(log) as file, _handled(signal.default_int_handler, signal.SIGTERM):
        process = subprocess.Popen(
            [*guard, *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=None if log is None and "ipykernel" not in sys.modules else subprocess.STDOUT,  # a kernel's is red
            process_group=0,
        )
        try:
            status = process.wait(deadline_s)
        except subprocess.TimeoutExpired as error:
            raise StepFailed(f"not done after {deadline_s:.0f} s; see {log or 'above'}") from error
        except KeyboardInterrupt as interrupt:
            if _ended(process) == 0 and log is None:
                raise StoppedAsAsked from interrupt
            raise
        finally:
            _ended(process)
    if status:
        raise StepFailed(
            f"status {status}: " + ("see above" if log is None else f"{_last_line(log)} (all of it: {log})")
        )


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Ask ``process`` to end if it runs, as often as this process is asked from now on; return its status."""
    if process.poll() is None:
        with _handled(lambda *_: process.terminate(), signal.SIGINT, signal.SIGTERM):
            process.terminate()
            process.wait()
    return process.returncode


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], Any], *numbers: signal.Signals) -> Iterator[None]:
    """Have ``handler`` called at these signals within the block."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _opened(log: Path | None) -> AbstractContextManager[BinaryIO | None]:
    if log is None:
        return nullcontext()
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("ab")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace", encoding="utf-8").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")
