"""The processor time of an episode of a file of functions: this code beside another, in one run.

    python benchmarks/episode_alone.py BASE [--episodes 200] [--json PATH]

BASE is a work tree of the code to compare with, with a .venv of its own. Both play the same episodes, one after the
other, in turns of so many, so that both meet the same machine: a file of one tool and one reward, and the same with
numpy imported. CPU seconds are of the node's process and of all below it. The time of a fork alone, of a process that
has imported the file and ends at once, is told beside it: it is the kernel's, and grows with the machine's load.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

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


def fork_s(module: str) -> float:
    """CPU seconds of a fork alone."""
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
    """CPU seconds of this process, its descendants, and of those that they have waited for."""
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


class Side:
    """One code, at work on one file."""

    def __init__(self, tree: Path, module: Path, episodes: int) -> None:
        self._process = subprocess.Popen(
            [tree / ".venv" / "bin" / "python", __file__, "--play", str(module), "--episodes", str(episodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree,
        )

    def seconds(self) -> float:
        """CPU seconds an episode, over one turn."""
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


def main() -> None:
    """Play both, and print milliseconds an episode."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("base", nargs="?", type=Path, help="a work tree of the code to compare with")
    parser.add_argument("--episodes", type=int, default=200, help="of a turn")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--play", help=argparse.SUPPRESS)
    parser.add_argument("--fork", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fork:
        print(fork_s(options.fork))
        return
    if options.play:
        asyncio.run(play(options.play, options.episodes))
        return
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
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
