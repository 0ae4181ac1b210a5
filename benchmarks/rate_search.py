"""The learning rate of an algorithm: found by doubling and halving, judged on dev, the same way for every algorithm.

The search begins at :data:`FIRST_RATE` and goes on beside the best rate so far, until both the double and the half of
the best are worse. Each rate is tried by one run with a seed of its own, as long as those that are reported. The best
has the highest greedy success on dev after the last iteration, then the highest reward of the last iterations.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from records import Record, read_record
from scored_runs import ALGORITHMS, WINDOW

SEARCH_SEED = 1000
"""Of the runs that choose a learning rate; none of the seeds that are reported."""
FIRST_RATE = 6e-4
FOLDER = "search"
"""Of the search's records, in the folder of the other records."""


def records_at(records: Path, rate: float) -> Path:
    """The folder of the records of the runs that tried ``rate``."""
    return records / FOLDER / f"lr{rate:g}"


def read_search(records: Path, name: str, budget: int) -> dict[float, Record]:
    """What was tried for an algorithm: rate -> its run.

    Raises:
        ConfigError: a record is of another budget.
    """
    rates = sorted(float(folder.name.removeprefix("lr")) for folder in (records / FOLDER).glob("lr*"))
    runs = {rate: read_record(records_at(records, rate), name, SEARCH_SEED, budget) for rate in rates}
    return {rate: run for rate, run in runs.items() if run is not None}


def merit(run: Record) -> tuple[float, float]:
    """Greedy success on dev at the end of a run, and the mean reward of its last iterations."""
    return run.iterations[-1]["dev_success"], statistics.fmean(line["reward"] for line in run.iterations[-WINDOW:])


def best_rate(search: Mapping[float, Record]) -> float:
    return max(search, key=lambda rate: merit(search[rate]))


def next_rate(search: Mapping[float, Record]) -> float | None:
    """The rate to try next; None when the search is at its end."""
    if not search:
        return FIRST_RATE
    best = best_rate(search)
    beside = (float(f"{best * factor:g}") for factor in (2.0, 0.5))
    return next((rate for rate in beside if rate not in search), None)


def search_table(searches: Mapping[str, Mapping[float, Record]]) -> str:
    """In Markdown: dev success and reward of each algorithm at each rate, the chosen one in bold."""
    rates = sorted({rate for search in searches.values() for rate in search})
    head = ["dev success / reward, last 5, at rate", *(f"{rate:g}" for rate in rates)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, search in searches.items():
        cells = {rate: "{:.3f} / {:.3f}".format(*merit(run)) for rate, run in search.items()}
        if next_rate(search) is None:
            cells[best_rate(search)] = f"**{cells[best_rate(search)]}**"
        lines.append(f"| {ALGORITHMS[name].label} | {' | '.join(cells.get(rate, '') for rate in rates)} |")
    return "\n".join(lines)
