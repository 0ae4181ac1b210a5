"""The learning rate of an algorithm: found by doubling and halving, judged on dev, the same way for every algorithm.

The search begins at :data:`FIRST_RATE` and goes on beside the best rate so far, until both the double and the half of
the best are tried. One run tries a rate, as long as those that are reported, with a seed of its own. Where several
rates are then about as good as the best, these are tried with the other :data:`SEARCH_SEEDS` too, and the one with the
best mean is chosen. Better means: higher greedy success on dev after the last iteration, then higher reward of the
last iterations.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

from records import Record, of_budget, read_all
from scored_runs import ALGORITHMS, WINDOW

SEARCH_SEEDS = (1000, 1001)
"""Seeds of the runs that choose a learning rate, other than those that are reported."""
FIRST_RATE = 6e-4
CLOSE = 0.05
"""Success on dev by which a rate may be below the best and still be about as good: one of the 24 tasks."""

Search = Mapping[float, Mapping[int, Record]]
"""The trials of an algorithm: rate -> seed -> its run."""


def read_search(records: Path, name: str, budget: int) -> Search:
    """Read the trials of an algorithm; seeds in the order in which they are tried.

    Raises:
        ConfigError: a record is of another budget.
    """
    search: dict[float, dict[int, Record]] = {}
    tried = {key: one for key, one in read_all(records).items() if one.searched and one.name == name}
    for _, seed, rate in sorted(key for key in tried if key[1] in SEARCH_SEEDS):
        search.setdefault(rate, {})[seed] = of_budget(records, tried[name, seed, rate], budget)
    return dict(sorted(search.items()))


def merit(runs: Iterable[Record]) -> tuple[float, float]:
    """Return greedy success on dev after a run, and the reward of its last iterations; means over ``runs``."""
    ends = [(run.iterations[-1]["dev_success"], [line["reward"] for line in run.iterations[-WINDOW:]]) for run in runs]
    success, rewards = zip(*ends, strict=True)
    # Rounded: as many tasks solved must be as much success, however they are spread over the runs.
    return round(statistics.fmean(success), 9), statistics.fmean(map(statistics.fmean, rewards))


def first_merit(search: Search, rate: float) -> tuple[float, float]:
    """Return the merit of the run that tried the rate first; every rate has one."""
    return merit([search[rate][SEARCH_SEEDS[0]]])


def close_rates(search: Search) -> list[float]:
    """Return the rates whose first run is about as good as the best one."""
    best, _ = max(first_merit(search, rate) for rate in search)
    return [rate for rate in search if first_merit(search, rate)[0] >= best - CLOSE]


def best_rate(search: Search) -> float:
    return max(close_rates(search), key=lambda rate: merit(search[rate].values()))


def next_trial(search: Search) -> tuple[float, int] | None:
    """Return the rate to try next and the seed; None when the search is at its end."""
    if not search:
        return FIRST_RATE, SEARCH_SEEDS[0]

    def beside(rate: float) -> list[tuple[float, int]]:
        neighbours = (float(f"{rate * factor:g}") for factor in (2.0, 0.5))
        return [(neighbour, SEARCH_SEEDS[0]) for neighbour in neighbours if neighbour not in search]

    close = close_rates(search)
    again = [(rate, seed) for seed in SEARCH_SEEDS for rate in close if seed not in search[rate]]
    trials = beside(max(close, key=lambda rate: first_merit(search, rate)))
    trials += again if len(close) > 1 else []
    trials += beside(best_rate(search))
    return trials[0] if trials else None


def search_table(searches: Mapping[str, Search]) -> str:
    """Return in Markdown dev success and reward of each algorithm at each rate, the chosen one in bold."""
    rates = sorted({rate for search in searches.values() for rate in search})
    head = ["dev success / reward, last 5, at rate", *(f"{rate:g}" for rate in rates)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, search in searches.items():
        cells = {rate: "{:.3f} / {:.3f}".format(*merit(runs.values())) for rate, runs in search.items()}
        cells |= {rate: f"{cell} ({len(search[rate])})" for rate, cell in cells.items() if len(search[rate]) > 1}
        if next_trial(search) is None:
            cells[best_rate(search)] = f"**{cells[best_rate(search)]}**"
        lines.append(f"| {ALGORITHMS[name].label} | {' | '.join(cells.get(rate, '') for rate in rates)} |")
    return "\n".join(lines)
