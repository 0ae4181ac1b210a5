"""How long a collection takes, by the order in which its episodes start and by when it stops. A simulation.

    python benchmarks/scheduling.py [--rollouts runs/demo/node/collections/*.jsonl] [--json results.json]

240 episodes (40 tasks x 6) on 32, 64, 128 and 240 slots. An episode holds a slot for its duration; durations do not
depend on how many slots are in use, so the rows show the effect of order and stop alone.

- ``synchronous``: task by task, and all 240 are waited for.
- ``authors``: task by task, stop at 4 rollouts of each task and 90 % of all (the order of the paper's authors).
- ``ours``: rollout_server.collecting.collector.Collector, the class that runs in the node, with the same floors.

``ours_stream`` is ``collection.stream: true``: loop_recipes.rollouts.group_stream.GroupStream over the same
collectors, a group each, for ``--iterations`` iterations with a policy lag of at most 4, beside ``ours`` for as many.
At each publication every running episode takes ``--prefill-s`` longer. An update takes ``--update-s``; the stream
samples meanwhile, ``ours`` does not. Its metrics: ``kept_per_slot_hour_ratio`` (rollouts that count, an hour and slot,
over those of ``ours``), ``given_up_fraction`` (episodes that were cut off, of all), ``lag_mean`` and ``lag_max``
(versions between a group's first turn and its update).

Durations: ``long_tailed`` is log-normal, median 60 s, with a factor per task (sigma 0.5) times one per rollout (sigma
0.7). ``measured`` draws tasks, and rollouts of them, from the log files given with --rollouts. With ``stuck``, 2 % of
the episodes run into the deadline, which is 30 times the median.

Every case is the mean over ``--draws`` draws of the durations, the same draws for all three. Metrics: ``makespan``
(seconds), ``makespan_ratio`` (synchronous over this one, the mean of the ratios), ``kept_fraction`` (rollouts that
count, of 240), ``wasted_fraction`` (slot time spent on episodes that were dropped).
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loop_formats.collection_request import CollectionRequest
from loop_formats.run_files import only_logs, read_lines
from loop_recipes.rollouts.group_stream import Group, GroupStream
from rollout_server.collecting.collector import Collector, EpisodeKey

TASKS, ROLLOUTS, FLOOR, FRACTION = 40, 6, 4, 0.9
SLOTS = (32, 64, 128, 240)
LAG, STREAM_DRAWS = 4, 3
STUCK_RATE, STUCK_MEDIANS = 0.02, 30.0
MEDIAN_S, TASK_SIGMA, ROLLOUT_SIGMA = 60.0, 0.5, 0.7

STREAM_UNITS = {"kept_per_slot_hour_ratio": "x", "given_up_fraction": "", "lag_mean": "", "lag_max": ""}

Durations = dict[tuple[str, int], float]
Metrics = dict[str, float]


@dataclass(frozen=True)
class Schedule:
    """The result of a simulated collection."""

    makespan: float
    kept: int
    wasted: float
    busy: float


class TaskByTask:
    """Every rollout of the first task, then of the second, and so on; ``early_stop`` as the floors say."""

    def __init__(self, request: CollectionRequest, early_stop: bool):
        order = [EpisodeKey(task, index, 0) for task in request.tasks for index in range(request.rollouts_per_task)]
        self._waiting = iter(order)
        self._early_stop = early_stop
        self._all = len(order)
        self._finished: dict[str, int] = dict.fromkeys(request.tasks, 0)
        self._request = request

    def start_next(self) -> EpisodeKey | None:
        return next(self._waiting, None)

    def finished(self, key: EpisodeKey) -> None:
        self._finished[key.task_id] += 1

    @property
    def outcome(self) -> str | None:
        total = sum(self._finished.values())
        floors = total >= self._request.floor_total and min(self._finished.values()) >= self._request.floor_per_task
        return "over" if total == self._all or (self._early_stop and floors) else None


def simulate(policy: Collector | TaskByTask, durations: Durations, slots: int) -> Schedule:
    """Run one collection on ``slots`` slots."""
    now, kept, busy = 0.0, 0, 0.0
    running: list[tuple[float, float, int, EpisodeKey]] = []
    number = 0
    while policy.outcome is None:
        while len(running) < slots and (key := policy.start_next()) is not None:
            heapq.heappush(running, (now + durations[key.task_id, key.index], now, number, key))
            number += 1
        now, started, _, key = heapq.heappop(running)
        busy += now - started
        kept += 1
        policy.finished(key)
    wasted = sum(now - started for _, started, _, _ in running)
    return Schedule(now, kept, wasted, busy + wasted)


class Stream:
    """A simulated node that works on groups, in the order in which they were opened, and the iterations that take them.

    Args:
        draw: the durations of 40 tasks at a time.
        prefill_s: seconds that every running episode loses when a version is published.
        update_s: seconds of an update. As in a run, groups are opened at its start, and not during it.
    """

    def __init__(
        self, draw: Callable[[random.Random], Durations], seed: int, slots: int, prefill_s: float, update_s: float
    ) -> None:
        self._draw, self._rng, self._slots = draw, random.Random(seed), slots
        self._prefill_s, self._update_s = prefill_s, update_s
        self._stream = GroupStream(TASKS, ROLLOUTS, FLOOR, FRACTION, LAG)
        self._drawn: list[list[float]] = []
        self._seconds: dict[int, list[float]] = {}
        self._node: dict[int, Collector] = {}
        self._finished: dict[int, int] = {}
        self._started: dict[int, tuple[float, int]] = {}
        self._running: list[tuple[float, int, int]] = []
        self._busy_with: dict[int, dict[int, EpisodeKey]] = defaultdict(dict)
        self._now, self._version = 0.0, 0
        self.kept, self.given_up, self.lags = 0, 0, list[int]()

    def run(self, iterations: int) -> Stream:
        while self._version < iterations:
            self._note()
            while due := self._stream.due():
                for _ in range(due):
                    self._open()
                self._start()
                self._note()
            self._start()
            for group in self._stream.late():
                self._end(group.number)
            if (chosen := self._stream.choose(self._version)) is not None:
                self._take(chosen)
                self._update()
            elif self._running:
                self._next()
        return self

    @property
    def rate(self) -> float:
        """Rollouts that count, an hour and slot."""
        return self.kept / self._now / self._slots * 3600

    def _note(self) -> None:
        groups = []
        for number in self._stream.groups:
            collector = self._node[number]
            # An episode that starts now has started.
            seconds = self._now - self._started[number][0] + 1e-9 if number in self._started else 0.0
            ended = collector.outcome is not None
            groups.append(Group(number, 0, self._finished[number], seconds=seconds, ended=ended))
        self._stream.note(groups, self._version)

    def _open(self) -> None:
        if not self._drawn:
            drawn = self._draw(self._rng)
            self._drawn = [[drawn[task, index] for index in range(ROLLOUTS)] for task in task_names()]
        number = self._stream.open(self._version)
        self._seconds[number] = self._drawn.pop(0)
        self._finished[number] = 0
        self._node[number] = Collector(CollectionRequest("group", ["task"], ROLLOUTS, 0, FLOOR))

    def _start(self) -> None:
        free = self._slots - sum(map(len, self._busy_with.values()))
        for number, collector in self._node.items():
            while free and (key := collector.start_next()) is not None:
                self._started.setdefault(number, (self._now, self._version))
                self._busy_with[number][key.index] = key
                heapq.heappush(self._running, (self._now + self._seconds[number][key.index], number, key.index))
                free -= 1

    def _next(self) -> None:
        self._now, number, index = heapq.heappop(self._running)
        self._node[number].finished(self._busy_with[number].pop(index))
        self._finished[number] += 1

    def _end(self, number: int) -> None:
        given_up = self._busy_with.pop(number, {})
        self.given_up += len(given_up)
        self._seconds[number] = [each for index, each in enumerate(self._seconds[number]) if index not in given_up]
        self._running = [episode for episode in self._running if episode[1] != number]
        heapq.heapify(self._running)
        self._node[number].stop("early_stop")

    def _take(self, chosen: list[Group]) -> None:
        for group in chosen:
            collector = self._node[group.number]
            if collector.outcome is None:
                self._end(group.number)
            del self._node[group.number]
            self.kept += self._finished.pop(group.number)
            self.lags.append(self._version - self._started.pop(group.number)[1])
        durations = [second for group in chosen for second in self._seconds.pop(group.number)]
        self._stream.take(chosen, durations)

    def _update(self) -> None:
        done = self._now + self._update_s
        for _ in range(self._stream.due(updating=True)):
            self._open()
        self._start()
        while self._running and self._running[0][0] < done:
            self._next()
            self._start()
        self._now = done
        self._version += 1
        self._running = [(end + self._prefill_s, number, index) for end, number, index in self._running]


def stream_metrics(
    draw: Callable[[random.Random], Durations], slots: int, iterations: int, prefill_s: float, update_s: float
) -> Metrics:
    """Compare the stream with as many collections in turn, of the same kind of durations."""
    request, metrics = collection(), defaultdict[str, float](float)
    for seed in range(STREAM_DRAWS):
        rng = random.Random(seed)
        today = [simulate(Collector(request), draw(rng), slots) for _ in range(iterations)]
        stream = Stream(draw, seed, slots, prefill_s, update_s).run(iterations)
        seconds = sum(each.makespan + update_s for each in today)
        rate = sum(each.kept for each in today) / seconds / slots * 3600
        metrics["kept_per_slot_hour_ratio"] += stream.rate / rate / STREAM_DRAWS
        metrics["given_up_fraction"] += stream.given_up / (stream.kept + stream.given_up) / STREAM_DRAWS
        metrics["lag_mean"] += statistics.mean(stream.lags) / STREAM_DRAWS
        metrics["lag_max"] = max(metrics["lag_max"], max(stream.lags))
    return metrics


def long_tailed(rng: random.Random) -> Durations:
    durations = {}
    for task in task_names():
        factor = math.exp(rng.gauss(0.0, TASK_SIGMA))
        for index in range(ROLLOUTS):
            durations[task, index] = MEDIAN_S * factor * math.exp(rng.gauss(0.0, ROLLOUT_SIGMA))
    return durations


def measured(seconds: list[list[float]]) -> Callable[[random.Random], Durations]:
    """Draw from per-task lists of measured durations."""

    def draw(rng: random.Random) -> Durations:
        durations = {}
        for task in task_names():
            of_task = rng.choice(seconds)
            for index in range(ROLLOUTS):
                durations[task, index] = rng.choice(of_task)
        return durations

    return draw


def with_stuck(draw: Callable[[random.Random], Durations]) -> Callable[[random.Random], Durations]:
    def stuck(rng: random.Random) -> Durations:
        durations = draw(rng)
        deadline = STUCK_MEDIANS * statistics.median(durations.values())
        return {
            key: deadline if rng.random() < STUCK_RATE else min(value, deadline) for key, value in durations.items()
        }

    return stuck


def task_names() -> list[str]:
    return [f"task_{number}" for number in range(TASKS)]


def read_seconds(files: list[Path]) -> list[list[float]]:
    """Read per task the durations of its rollouts in the log files."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for file in files:
        for line in read_lines(file):
            seconds[line.record["task_id"]].append(line.record["seconds"])
    return list(seconds.values())


def collection() -> CollectionRequest:
    """Return the request of one iteration."""
    return CollectionRequest(
        id="benchmark",
        tasks=task_names(),
        rollouts_per_task=ROLLOUTS,
        policy_version=0,
        min_rollouts_per_task=FLOOR,
        min_rollouts_fraction=FRACTION,
    )


def run_case(draw: Callable[[random.Random], Durations], slots: int, draws: int) -> dict[str, dict[str, float]]:
    """Return metrics per implementation."""
    request = collection()
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for seed in range(draws):
        durations = draw(random.Random(seed))
        schedules = {
            "synchronous": simulate(TaskByTask(request, early_stop=False), durations, slots),
            "authors": simulate(TaskByTask(request, early_stop=True), durations, slots),
            "ours": simulate(Collector(request), durations, slots),
        }
        for name, schedule in schedules.items():
            sums[name]["makespan"] += schedule.makespan / draws
            sums[name]["makespan_ratio"] += schedules["synchronous"].makespan / schedule.makespan / draws
            sums[name]["kept_fraction"] += schedule.kept / (TASKS * ROLLOUTS) / draws
            sums[name]["wasted_fraction"] += schedule.wasted / schedule.busy / draws
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rollouts", type=Path, nargs="*", default=sorted(Path("runs/demo/node/collections").glob("*"))
    )
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--iterations", type=int, default=20, help="of the stream, and of what it is compared with")
    parser.add_argument("--prefill-s", type=float, nargs="*", default=[2.0, 0.0, 6.0])
    parser.add_argument("--update-s", type=float, nargs="*", default=[0.0, 600.0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    distributions: dict[str, Callable[[random.Random], Durations]] = {"long_tailed": long_tailed}
    files = only_logs(options.rollouts)
    seconds = read_seconds(files)
    if seconds:
        count = sum(map(len, seconds))
        print(f"measured: {count} rollouts of {len(seconds)} tasks from {len(files)} files")
        distributions["measured"] = measured(seconds)
    else:
        print("measured: no log files (give --rollouts), left out")
    rows = []
    units = {"makespan": "s", "makespan_ratio": "x", "kept_fraction": "", "wasted_fraction": ""}
    print(f"{'case':44}" + "".join(f"{name:>17}" for name in units))
    for name, draw in distributions.items():
        for kind, drawn in ((name, draw), (f"{name}_stuck", with_stuck(draw))):
            for slots in SLOTS:
                for implementation, metrics in run_case(drawn, slots, options.draws).items():
                    case = f"{implementation} 240_episodes_{slots}_slots_{kind}"
                    print(f"{case:44}" + "".join(f"{metrics[metric]:17.3f}" for metric in units))
                    rows += [
                        {"case": case, "metric": m, "value": metrics[m], "unit": unit} for m, unit in units.items()
                    ]
    print(f"{'case':66}" + "".join(f"{name:>26}" for name in STREAM_UNITS))
    for name, draw in distributions.items():
        for kind, drawn in ((name, draw), (f"{name}_stuck", with_stuck(draw))):
            for slots, prefill_s, update_s in itertools.product(SLOTS, options.prefill_s, options.update_s):
                metrics = stream_metrics(drawn, slots, options.iterations, prefill_s, update_s)
                suffix = "" if prefill_s == options.prefill_s[0] else f"_prefill_{prefill_s:g}_s"
                suffix += "" if update_s == options.update_s[0] else f"_update_{update_s:g}_s"
                case = f"ours_stream 240_episodes_{slots}_slots_{kind}{suffix}"
                print(f"{case:66}" + "".join(f"{metrics[metric]:26.3f}" for metric in STREAM_UNITS), flush=True)
                rows += [{"case": case, "metric": m, "value": metrics[m], "unit": u} for m, u in STREAM_UNITS.items()]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
