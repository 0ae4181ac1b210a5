"""Print what the first commands of a reader cost: CPU seconds, and the modules that they import.

    python benchmarks/imports.py [--runs 3]

Seconds are of the processor (user and system, with those of processes that were started), the least of the runs, so
that a busy machine adds little; their bounds leave room for one. Modules are counted by ``-X importtime`` in the
first process alone; their bounds are close, since a machine changes nothing in them. Most seconds of ``loop try`` are
those of its 303 episodes, each a process. Ends with 1 where a number is above its bound, or where a command imports a
package that it must not.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass

LOOP = ("-m", "loop_recipes.cli")
HEAVY = ("torchtune", "torchao", "transformers", "datasets")
IMPORTED = re.compile(r"import time: .*\| +([\w.]+)$")


@dataclass(frozen=True)
class Command:
    """A command of the interpreter, and its bounds; ``without`` names packages that it must not import."""

    name: str
    words: tuple[str, ...]
    most_seconds: float
    most_modules: int
    without: tuple[str, ...] = ()


COMMANDS = (
    Command("loop --help", (*LOOP, "--help"), 0.3, 200, ("torch", "omegaconf", "pydantic")),
    Command("loop try my_game.py", (*LOOP, "try", "my_game.py"), 6.0, 550, ("torch", "jinja2", "rich", *HEAVY)),
    Command("loop check tiny_cpu", (*LOOP, "check", "tiny_cpu"), 6.5, 2500, HEAVY),
    Command("import loop_recipes", ("-c", "import loop_recipes"), 0.2, 130, ("torch", "omegaconf", "pydantic")),
    Command("the trainer's imports", ("-c", "import loop_recipes.algorithm.training_recipe"), 12.0, 5000),
)


def seconds(words: tuple[str, ...], folder: str) -> float:
    """Return the CPU seconds of one run of the interpreter in ``folder``, in which it must exit with 0."""
    running = subprocess.Popen([sys.executable, *words], cwd=folder, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(running.pid, 0)
    running.returncode = os.waitstatus_to_exitcode(status)
    if running.returncode:
        sys.exit(f"{' '.join(words)} exited with {running.returncode}")
    return used.ru_utime + used.ru_stime


def modules(words: tuple[str, ...], folder: str) -> set[str]:
    """Return the modules that one run of the interpreter in ``folder`` imports."""
    command = [sys.executable, "-X", "importtime", *words]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return {match[1] for line in run.stderr.splitlines() if (match := IMPORTED.match(line))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="for the seconds")
    args = parser.parse_args()
    wrong = []
    print(f"{'command':<24}{'CPU-s':>7}{'at most':>9}{'modules':>9}{'at most':>9}")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, *LOOP, "init", "my_game"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for each in COMMANDS:
            imported = modules(each.words, folder)
            least = min(seconds(each.words, folder) for _ in range(args.runs))
            print(f"{each.name:<24}{least:>7.2f}{each.most_seconds:>9}{len(imported):>9,}{each.most_modules:>9,}")
            unwanted = [package for package in each.without if package in imported]
            wrong += [f"{each.name} imports {package}" for package in unwanted]
            if least > each.most_seconds or len(imported) > each.most_modules:
                wrong.append(f"{each.name} is above its bound")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
