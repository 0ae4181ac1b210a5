"""A run's stream of groups: what it has the node collect, and what each iteration takes of it. Lives on rank 0 only.

``stream.jsonl`` in the run's folder says in order what was done, each line on disk before it is acted on:
``{"opened": number, "request": {...}}``, and ``{"taken": {"group": id, "iteration": n, "versions": [...]}}`` once an
iteration has chosen all its groups. A checkpoint says how far its run had come. What was opened since is opened again,
and what the iteration after it had taken it takes again: so each group is trained on once, whoever died when, and a
replay of the node's logs knows which of them an iteration is made of.
"""

from __future__ import annotations

import bisect
import json
import logging
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loop_formats.collection_request import CollectionEnd, CollectionRequest, losses, too_many_lost
from loop_formats.rollout import Rollout
from loop_formats.run_files import read_lines, write_whole, writing
from loop_formats.run_folder import STREAM_FILE
from loop_formats.schema import ConfigError
from loop_plumbing import running_time
from loop_recipes.config.loop_config import CollectionConfig
from loop_recipes.rollouts.group_stream import Group, GroupStream
from loop_recipes.rollouts.node_source import NodeSource
from loop_recipes.rollouts.plan import CollectionPlan
from loop_recipes.rollouts.source import Collected, NoRollouts, merge_ends, tell_of
from loop_recipes.rollouts.waiting import Waiting
from rollout_server.client import CollectionFailed
from rollout_server.collecting.rollout_log import AppendLog

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Between two looks at the node."""


class Stream:
    """The groups of a run.

    Args:
        folder: the run's.
        iterations_done: of the checkpoint that it goes on from.
        state: of that checkpoint; None begins anew.

    Raises:
        ConfigError: ``stream.jsonl`` lacks what the checkpoint speaks of.
    """

    def __init__(
        self,
        config: CollectionConfig,
        plan: CollectionPlan,
        folder: Path,
        iterations_done: int,
        state: Mapping[str, Any] | None,
    ) -> None:
        self._config, self._plan = config, plan
        self._groups = GroupStream(
            config.tasks_per_iteration,
            config.rollouts_per_task,
            config.min_rollouts_per_task,
            config.min_rollouts_fraction,
            config.max_policy_lag,
            config.publish_every,
            pinned=config.mode == "pinned",
        )
        self._requests: dict[int, CollectionRequest] = {}
        self._taken: list[int] = []
        """The groups that the iteration under way had taken when its run was killed."""
        self._last_take = self._looked = running_time.now()
        self._paced, self._paced_s = False, 0.0
        file = folder / STREAM_FILE
        if state is None:
            file.unlink(missing_ok=True)
        else:
            self._go_on(file, iterations_done, state)
        self._log = AppendLog(file, lambda record: True)

    def _go_on(self, file: Path, iterations_done: int, state: Mapping[str, Any]) -> None:
        """Read what was opened and taken since the checkpoint, and what the groups that it knows are."""
        self._groups.load_state_dict(state)
        known, kept, numbers = self._groups.opened, list[str](), dict[str, int]()
        for line in read_lines(file) if file.exists() else ():
            match line.record:
                case {"opened": int(number), "request": dict(fields)}:
                    request = CollectionRequest.from_dict(fields)
                    numbers[request.id] = number
                    if number >= known:
                        if self._plan.next_task(iterations_done + 1) != request.tasks[0]:
                            raise ConfigError(
                                f"{file}:{line.number}: the run would draw another task now; remove the line"
                            )
                        self._groups.open(request.policy_version)
                    if number in self._groups.groups:
                        self._requests[number] = request
                case {"taken": {"group": str(group), "iteration": int(iteration)}}:
                    if iteration > iterations_done + 1:  # the run went back: what comes now was of weights it gave up
                        break
                    if iteration > iterations_done:
                        self._taken.append(numbers[group])
                case _:
                    raise ConfigError(f"{file}:{line.number} is not a line of a stream")
            kept.append(json.dumps(line.record))
        if missing := self._groups.groups.keys() - self._requests.keys():
            raise ConfigError(f"{file} does not say what group {min(missing)} is; bring the file back")
        write_whole(file, "".join(f"{line}\n" for line in kept))

    def give_up(self) -> None:
        """Let go of all that is open, as for a run that rests on something else now."""
        self._groups.take(list(self._groups.groups.values()))
        self._requests.clear()
        self._taken = []

    def take(self, source: NodeSource, iteration: int, version: int, served: int, adapter: str) -> Collected:
        """Wait for the groups of an iteration; their rollouts, once ``stream.jsonl`` says that they are taken.

        Args:
            version: the newest, and ``served`` the newest that the node samples from.
            adapter: the digest of the latter's.

        Raises:
            NoRollouts: ``collection.deadline_s`` has passed.
            CollectionFailed: more rollouts are lost than the config allows.
            StopRequested: as the source does.
        """
        started, parts = running_time.now(), dict[int, Collected]()
        failed: list[CollectionEnd] = []
        with Waiting(f"collecting the groups of iteration {iteration}") as waiting:
            while True:
                self._open(source, iteration, served, adapter)
                for group in self._groups.late():
                    source.end_early(self._requests[group.number])
                chosen = self._groups.choose(version, self._taken)
                if chosen is not None and self._read(source, chosen, parts, failed):
                    break
                if running_time.now() - started > self._config.deadline_s:
                    ended = sum(group.ended for group in self._groups.groups.values())
                    raise NoRollouts(
                        f"iteration {iteration} had {ended} of {self._groups.tasks} groups after "
                        f"{self._config.deadline_s:.0f} s (collection.deadline_s)"
                    )
                if chosen is None:
                    waiting.told(self._told())
                    time.sleep(POLL_S)
        assert chosen is not None, "it has been read"
        of = [parts[group.number] for group in chosen]
        self._note_taken(iteration, chosen, of)
        rollouts = [rollout for part in of for rollout in part.rollouts]
        self._groups.take(chosen, (each.seconds for each in rollouts if each.segment == 0))
        for group in chosen:
            del self._requests[group.number]
        self._open(source, iteration, served, adapter, updating=True)
        end = merge_ends([*(part.end for part in of), *failed])
        end = replace(end, seconds=running_time.now() - self._last_take)
        collected = Collected(rollouts, end, running_time.now() - started)
        self._last_take = running_time.now()
        asked = self._groups.tasks * self._groups.rollouts
        tell_of(collected, f"iteration {iteration}", asked, source, first=iteration == 1)
        return collected

    def figures(self, collected: Collected, version: int) -> dict[str, float]:
        """What metrics.jsonl says of a stream, of rollouts that ``version`` learns from."""
        lags = [version - min(rollout.policy_versions) for rollout in collected.rollouts]
        quarters = statistics.quantiles([r.seconds for r in collected.rollouts if r.segment == 0] * 2, n=4)
        given_up = [bisect.bisect(quarters, seconds) for seconds in collected.end.dropped_seconds]
        groups = self._groups.groups.values()
        paced, self._paced_s = self._paced_s, 0.0
        return {
            "lag_mean": statistics.mean(lags),
            "lag_p90": statistics.quantiles(lags * 2, n=10)[-1],
            **{f"given_up_quarter_{number}": given_up.count(number - 1) for number in (1, 2, 3, 4)},
            "open_groups": len(groups),
            "queued_groups": sum(not group.seconds and not group.ended for group in groups),
            "seconds_paced": paced,
            "reprefilled_tokens": sum(map(_reprefilled, collected.rollouts)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain data; what a checkpoint says of it."""
        return self._groups.state_dict()

    def close(self, source: NodeSource) -> None:
        """Have the node stop what no iteration will take."""
        for number, group in self._groups.groups.items():
            if not group.ended:
                source.cancel(self._requests[number])

    def _open(self, source: NodeSource, iteration: int, served: int, adapter: str, updating: bool = False) -> None:
        """Look at what is open, and open what is due."""
        self._look(source, served)
        new = {}
        for _ in range(self._groups.due(updating)):
            number = self._groups.open(served)
            new[number] = self._plan.group(number, iteration, served, adapter)
        self._note(json.dumps({"opened": number, "request": each.to_dict()}) for number, each in new.items())
        self._requests |= new
        groups = self._groups.groups.values()
        begun = all(group.seconds or group.ended for group in groups)
        self._paced = begun and len(groups) >= self._groups.most_open(updating)
        for request in new.values():
            source.start(request)

    def _look(self, source: NodeSource, served: int) -> None:
        told, seen = source.collections(), []
        for number, group in self._groups.groups.items():
            if group.ended:
                continue
            row = told.get(self._requests[number].id)
            if row is None or row["state"] == "cancelled":  # asked for by a process that died, or of a node that did
                source.start(self._requests[number])
            else:
                ended = row["state"] != "running"
                seen.append(Group(number, 0, row["finished"], row["lost"], row["seconds"], ended))
        self._groups.note(seen, served)
        before, self._looked = self._looked, running_time.now()
        self._paced_s += self._paced * (self._looked - before)

    def _told(self) -> str:
        groups = self._groups.groups.values()
        ended, running = sum(group.ended for group in groups), sum(bool(group.seconds) for group in groups)
        return f"{ended} groups ended, {running} running, {len(groups) - ended - running} waiting"

    def _read(
        self, source: NodeSource, chosen: Sequence[Group], parts: dict[int, Collected], failed: list[CollectionEnd]
    ) -> bool:
        """Get the rollouts of groups, those that still run up to here; False where one is lost altogether."""
        for group in chosen:
            request = self._requests[group.number]
            if group.number in parts:
                continue
            if not group.ended:
                source.end_early(request)
            try:
                parts[group.number] = source.read(request)
            except CollectionFailed as error:
                if too_many_lost(error.end.lost, request) is None:
                    raise
                failed.append(error.end)
                self._groups.take([group])
                del self._requests[group.number]
        end = merge_ends([*(part.end for part in parts.values()), *failed])
        most = self._groups.tasks * self._groups.rollouts
        if len(end.lost) > self._config.max_lost_share * most:
            raise CollectionFailed(f"{losses(end.lost, most)} (collection.max_lost_share)", end)
        return all(group.number in parts for group in chosen)

    def _note_taken(self, iteration: int, chosen: Sequence[Group], parts: Sequence[Collected]) -> None:
        lines = []
        for group, part in zip(chosen, parts, strict=True):
            if group.number not in self._taken:
                versions = sorted({version for rollout in part.rollouts for version in rollout.policy_versions})
                named = {"group": self._requests[group.number].id, "iteration": iteration, "versions": versions}
                lines.append(json.dumps({"taken": named}))
        self._note(lines)
        self._taken = []

    def _note(self, lines: Iterable[str]) -> None:
        if lines := list(lines):
            with writing(self._log.path):
                self._log.append(lines)


def _reprefilled(rollout: Rollout) -> int:
    """Prompt tokens that were computed again because a version had taken over since the turn before."""
    turns = zip(rollout.turns, rollout.turns[1:], strict=False)
    return sum(
        max(0, now.start - now.cached_tokens) for before, now in turns if now.policy_version != before.policy_version
    )
