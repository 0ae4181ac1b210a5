"""The processor time of an episode of a file of functions: this code beside another, in one run.

    python benchmarks/episode_alone.py BASE [--episodes 200] [--json PATH]

BASE is a work tree of the code to compare with, with a .venv of its own. Both play the same episodes, one after the
other, in turns of so many, so that both meet the same machine: a file of one tool and one reward, and the same with
numpy imported. CPU seconds are of the node's process and of all below it. The time of a fork alone, of a process that
has imported the file and ends at once, stands beside it: it is the kernel's, and grows with the machine's load.

Then sessions of `code: python`: milliseconds to the first answer, by the clock and of a processor, milliseconds of
another call, and MiB (shares of pages that are shared). The measure is `bwrap ... python3 -c pass`, in turns with them:
it ends 1 where this code's first answer takes more than twice as long.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from loop_plumbing.process_guard import descendants

REPOSITORY = Path(__file__).resolve().parents[1]
FUNCTIONS = '''
from agent_environments.tools import reward, tool


@tool(terminal=True)
def answer(value: int) -> int:
    """Give the answer."""
    return value


@reward
def right(answer: str, target: int) -> bool:
    return answer == str(target)


TASKS = [{"id": f"sum{n}", "question": f"What is {n} + 1?", "target": n + 1} for n in range(100)]
'''
FILES = {"functions": FUNCTIONS, "functions and numpy": "import numpy\n" + FUNCTIONS}
ROUNDS = 5
FORKS = 200
SESSIONS = 20


def fork_s(module: str) -> float:
    """Return CPU seconds of a fork alone."""
    from agent_environments.tools.module import load_module

    load_module(module)
    gc.collect()
    gc.freeze()
    before = processor_s()
    for _ in range(FORKS):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return (processor_s() - before) / FORKS


def processor_s() -> float:
    """Return CPU seconds of this process, its descendants, and of those that they have waited for."""
    total = 0
    below = {os.getpid()}
    stats = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stats[int(entry)] = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
    while more := {pid for pid, fields in stats.items() if int(fields[1]) in below} - below:
        below |= more
    for pid in below & set(stats):
        total += sum(map(int, stats[pid][11:15]))
    return total / os.sysconf("SC_CLK_TCK")


async def play(module: str, episodes: int) -> None:
    """Answer each line of standard input with the CPU seconds that so many episodes took."""
    from agent_environments.tools.environment import ToolPool

    pool = ToolPool(lambda text: [], module, max_worlds=4)
    await pool.open()
    call = '<tool_call>\n{"name": "answer", "arguments": {"value": 1}}\n</tool_call>'

    async def episode(number: int) -> None:
        environment = await pool.acquire(str(number))
        await environment.start(f"sum{number % 100}")
        await environment.step(call)
        await environment.grade()
        await environment.close()

    while await asyncio.to_thread(sys.stdin.readline):
        before = processor_s()
        for number in range(episodes):
            await episode(number)
        print(json.dumps((processor_s() - before) / episodes), flush=True)
    await pool.close()


def bubblewrap_ms() -> float:
    """Return the milliseconds in which bubblewrap starts an idle interpreter; NaN where there is none."""
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    command += [os.path.realpath(sys.executable), "-c", "pass"]
    began = time.perf_counter()
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError):
        return float("nan")
    return 1000 * (time.perf_counter() - began)


def megabytes(root: int) -> float:
    """Return the MiB of all that runs below a process, of shared pages their share."""
    total = 0
    for pid in descendants(root):
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{pid}/smaps_rollup").read_text().partition("\nPss:")[2].split()[0])
    return total / 1024


async def sessions(count: int) -> None:
    """Print what so many sessions of `code: python` took, and bubblewrap alone, as medians."""
    from loop_contrib.code_tool.python_tool import PythonSessions

    server = PythonSessions("python")
    await server.open()
    rows = []
    for _ in range(count):
        alone = bubblewrap_ms()
        before, small = processor_s(), megabytes(server._server.pid)
        session = server.session()
        tool = getattr(session, "tools", [session])[0]
        clock = [time.perf_counter()]
        for code in ("6 * 7", "1", "2", "3"):
            await tool.call({"code": code}, None)
            clock.append(time.perf_counter())
        large = megabytes(server._server.pid)
        await session.close()
        rows.append((clock[1] - clock[0], (clock[4] - clock[1]) / 3, processor_s() - before, large - small, alone))
    first, call, processor, size, alone = (statistics.median(each) for each in zip(*rows, strict=True))
    figures = {"first_ms": 1000 * first, "call_ms": 1000 * call, "processor_ms": 1000 * processor, "mib": size}
    print(json.dumps({**figures, "bubblewrap_ms": alone}))
    await server.close()


class Side:
    """A checkout's code, at work on one file."""

    def __init__(self, tree: Path, module: Path, episodes: int) -> None:
        self._process = subprocess.Popen(
            [tree / ".venv" / "bin" / "python", __file__, "--play", str(module), "--episodes", str(episodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree,
        )

    def seconds(self) -> float:
        """Return the CPU seconds an episode, over one turn."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def end(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> int:
    """Play both, and print milliseconds an episode and what sessions take."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("base", nargs="?", type=Path, help="a work tree of the code to compare with")
    parser.add_argument("--episodes", type=int, default=200, help="of a turn")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--play", help=argparse.SUPPRESS)
    parser.add_argument("--fork", help=argparse.SUPPRESS)
    parser.add_argument("--sessions", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fork:
        print(fork_s(options.fork))
        return 0
    if options.sessions:
        asyncio.run(sessions(options.sessions))
        return 0
    if options.play:
        asyncio.run(play(options.play, options.episodes))
        return 0
    if options.base is None:
        parser.error("name a work tree to compare with")
    rows = []
    for name, source in FILES.items():
        with tempfile.TemporaryDirectory() as folder:
            module = Path(folder, "mine.py")
            module.write_text(source)
            sides = [Side(tree.resolve(), module, options.episodes) for tree in (options.base, REPOSITORY)]
            for side in sides:
                side.seconds()  # the first turn imports, and fills caches
            turns = [[side.seconds() for side in sides] for _ in range(ROUNDS)]
            for side in sides:
                side.end()
            command = [sys.executable, __file__, "--fork", str(module)]
            fork = 1000 * float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        base, ours = (1000 * statistics.median(each) for each in zip(*turns, strict=True))
        rows.append({"file": name, "base_ms": base, "ours_ms": ours, "more_ms": ours - base, "fork_ms": fork})
        print(
            f"{name:<20} base {base:6.2f} ms  ours {ours:6.2f} ms  {ours - base:+.2f} ms an episode, "
            f"of which a fork alone is {fork:.2f} ms",
            flush=True,
        )
    for name, tree in (("base", options.base.resolve()), ("ours", REPOSITORY)):
        command = [str(tree / ".venv" / "bin" / "python"), __file__, "--sessions", str(SESSIONS)]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True)
        rows.append({"code": name, **json.loads(done.stdout)})
        print("code: python,", *(f"{key} {value:.1f}" for key, value in rows[-1].items() if key != "code"), f"({name})")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if rows[-1]["first_ms"] > 2 * rows[-1]["bubblewrap_ms"] else 0


if __name__ == "__main__":
    sys.exit(main())
