"""Say how long `make demo` will take here: a fixed piece of work is timed on two processes at once.

    python benchmarks/demo_minutes.py runs/demo

Needs nothing but any Python 3, since nothing is installed yet. A unit of the work takes UNIT_S on the machine whose
quiet cores need SECONDS for the parts of the demo. A part that is done already does not count, and neither does a
download.
"""

import sys
import time
from multiprocessing import Pool
from pathlib import Path

# The parts of a demo of 578 s (benchmarks/demo.sh) on a machine that was timed right after it.
SECONDS = {"packages and world": 120, "training": 320, "evaluation": 138}
UNIT_S = 0.215
UNITS = 8


def work(_):
    """Add numbers for UNIT_S of a quiet core."""
    total = 0
    for number in range(4 * 10**6):
        total += number
    return total


def left(run, checkout=Path(".")):
    """Return the seconds on quiet cores of the parts that are not done yet, in all."""
    needed = (".venv/.installed-*", "worlds/synthetic/dataset.json")
    installed = all(any(checkout.glob(name)) for name in needed)
    done = {"packages and world": installed, "training": (run / ".trained").exists()}
    return sum(seconds for part, seconds in SECONDS.items() if not done.get(part))


def main():
    with Pool(2) as pool:
        pool.map(abs, [1, 2])  # so that starting the processes is not timed
        started = time.perf_counter()
        pool.map(work, range(UNITS), chunksize=1)
        slower = (time.perf_counter() - started) / (UNITS / 2 * UNIT_S)
    minutes = left(Path(sys.argv[1])) * slower / 60
    print(f"this takes about {minutes:.0f} minutes here, and the download of what uv has not cached")


if __name__ == "__main__":
    main()
