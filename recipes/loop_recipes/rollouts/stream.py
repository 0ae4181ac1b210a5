"""A run's stream of groups: those that the node collects, and those that each iteration takes. Lives on rank 0 only.

``stream.jsonl`` in the run's folder lists the steps in order, each line on disk before the run acts on it:
``{"opened": number, "request": {...}}``, and ``{"taken": {"group": id, "iteration": n, "versions": [...]}}`` once an
iteration has chosen all its groups. A checkpoint tells how far its run had come. Groups opened since are opened again,
and the next iteration takes again the groups that it had taken. So each group is trained on once, whichever process
died when, and a replay of the node's logs knows which of them make an iteration.
"""

from __future__ import annotations

import bisect
import json
import logging
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from loop_formats.collection_request import CollectionEnd, CollectionRequest, losses, too_many_lost
from loop_formats.rollout import Rollout
from loop_formats.run_files import STREAM_FILE, read_lines, write_whole, writing
from loop_formats.schema import ConfigError
from loop_plumbing import running_time
from loop_plumbing.breakage import raised_as
from loop_recipes.config.loop_config import CollectionConfig
from loop_recipes.rollouts.group_stream import Group, GroupStream
from loop_recipes.rollouts.node_source import NodeSource
from loop_recipes.rollouts.plan import CollectionPlan
from loop_recipes.rollouts.source import Collected, NoRollouts, log_problems, merge_ends
from loop_recipes.rollouts.waiting import Waiting
from rollout_server.client import CollectionFailed, RolloutNodeError
from rollout_server.collecting.rollout_log import AppendLog

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between two requests for the node's state."""
CURE = "remove it and the lines after it, or give the config that the run was started with"


class Stream:
    """The groups of a run.

    Args:
        folder: the run's folder.
        iterations_done: number of iterations in the checkpoint that the run goes on from.
        state: the stream's state in the checkpoint; without one the stream begins anew.
        give_up: true if the model or the grader has changed: all open groups are given up.

    Raises:
        ConfigError: ``stream.jsonl`` is damaged, lacks a group that the checkpoint names, or is of another config.
    """

    def __init__(
        self,
        config: CollectionConfig,
        plan: CollectionPlan,
        folder: Path,
        iterations_done: int,
        state: Mapping[str, Any] | None,
        give_up: bool = False,
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
        self._opened_before = 0
        """Groups that a process opened which died before the first checkpoint; the node may have finished them."""
        file = folder / STREAM_FILE
        if not state and iterations_done == 0 and file.exists():
            self._opened_before = sum("opened" in line for line in file.read_text(errors="replace").splitlines())
        if not state and not self._opened_before:
            file.unlink(missing_ok=True)
        if state:
            with raised_as(ConfigError, "resume_from_checkpoint: "):
                self._go_on(file, iterations_done, state, give_up)
        self._log = AppendLog(file, lambda record: True)

    def _go_on(self, file: Path, iterations_done: int, state: Mapping[str, Any], give_up: bool) -> None:
        """Read the groups opened and taken since the checkpoint, and the requests of the groups in the checkpoint."""
        self._groups.load_state_dict({**state, "groups": []} if give_up else state)
        known, lines, numbers = self._groups.opened, list[str](), dict[str, int]()
        last = iterations_done if give_up else iterations_done + 1
        for line in read_lines(file) if file.exists() else ():
            match line.record:
                case {"opened": int(number), "request": dict(fields)}:
                    request = CollectionRequest.from_dict(fields)
                    numbers[request.id] = number
                    if number >= known:
                        if give_up:
                            break
                        if self._plan.next_task(iterations_done + 1) != request.tasks[0]:
                            raise ConfigError(f"{file}:{line.number}: the run would draw another task now; {CURE}")
                        self._groups.open(request.policy_version)
                    if number in self._groups.groups:
                        self._requests[number] = request
                case {"taken": {"group": str(group), "iteration": int(iteration)}} if group in numbers:
                    if iteration > last:  # the run went back: later lines are of weights that it gave up
                        break
                    if iteration > iterations_done:
                        self._taken.append(numbers[group])
                case _:
                    raise ConfigError(f"{file}:{line.number} is not a line of this stream; {CURE}")
            lines.append(json.dumps(line.record))
        if missing := self._groups.groups.keys() - self._requests.keys():
            raise ConfigError(f"{file} does not say what group {min(missing)} is; bring the file back")
        write_whole(file, "".join(f"{line}\n" for line in lines))

    def take(self, source: NodeSource, iteration: int, version: int, served: int, adapter: str) -> Collected:
        """Wait for the groups of an iteration; return their rollouts, once ``stream.jsonl`` has them as taken.

        Args:
            version: the newest, and ``served`` the newest that the node samples from.
            adapter: the digest of the adapter of ``served``.

        Raises:
            NoRollouts: ``collection.deadline_s`` has passed.
            CollectionFailed: more rollouts are lost than the config allows.
            StopRequested: as the source does.
        """
        started, by_group = running_time.now(), dict[int, Collected]()
        failed: list[CollectionEnd] = []
        with Waiting(f"collecting the groups of iteration {iteration}") as waiting:
            while True:
                self._open(source, iteration, served, adapter)
                for group in self._groups.late():
                    source.end_early(self._requests[group.number])
                chosen = self._groups.choose(version, self._taken)
                if chosen is not None and self._read(source, chosen, by_group, failed):
                    break
                if running_time.now() - started > self._config.deadline_s:
                    ended = sum(group.ended for group in self._groups.groups.values())
                    raise NoRollouts(
                        f"iteration {iteration} had {ended} of {self._groups.tasks} groups after "
                        f"{self._config.deadline_s:.0f} s (collection.deadline_s)"
                    )
                if chosen is None:
                    waiting.report(self._progress())
                    time.sleep(POLL_S)
        assert chosen is not None, "it has been read"
        taken = [by_group[group.number] for group in chosen]
        self._note_taken(iteration, chosen, taken)
        rollouts = [rollout for each in taken for rollout in each.rollouts]
        self._groups.take(chosen, (each.seconds for each in rollouts if each.segment == 0))
        for group in chosen:
            del self._requests[group.number]
        self._open(source, iteration, served, adapter, updating=True)
        end = merge_ends([*(each.end for each in taken), *failed])
        end = replace(end, seconds=running_time.now() - self._last_take)
        collected = Collected(rollouts, end, running_time.now() - started)
        self._last_take = running_time.now()
        asked = self._groups.tasks * self._groups.rollouts
        log_problems(collected, f"iteration {iteration}", asked, source, first=iteration == 1)
        return collected

    def figures(self, collected: Collected, version: int) -> dict[str, float]:
        """Return the stream's metrics for rollouts that ``version`` learns from."""
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
        """Return the state for a checkpoint, as plain data."""
        return self._groups.state_dict()

    def close(self, source: NodeSource) -> None:
        """Have the node stop the groups that no iteration will take."""
        for number, group in self._groups.groups.items():
            if not group.ended:
                with suppress(RolloutNodeError):  # another node, which never had the group
                    source.cancel(self._requests[number])

    def _open(self, source: NodeSource, iteration: int, served: int, adapter: str, updating: bool = False) -> None:
        """Update the open groups, and open those that are due."""
        self._look(source, served)
        new = {}
        again, self._opened_before = min(self._opened_before, self._groups.most_open()), 0
        for _ in range(again or self._groups.due(updating)):
            number = self._groups.open(served)
            new[number] = self._plan.group(number, iteration, served, adapter)
        lines = [json.dumps({"opened": number, "request": each.to_dict()}) for number, each in new.items()]
        if again:
            write_whole(self._log.path, "".join(f"{line}\n" for line in lines))
            self._log = AppendLog(self._log.path, lambda record: True)
        else:
            self._note(lines)
        self._requests |= new
        self._paced = all(group.seconds or group.ended for group in self._groups.groups.values())
        for request in new.values():
            source.start(request)

    def _look(self, source: NodeSource, served: int) -> None:
        rows, reports = source.collections(), []
        for number, group in self._groups.groups.items():
            if group.ended:
                continue
            row = rows.get(self._requests[number].id)
            if row is None or row["state"] == "cancelled":  # the process that asked for it, or the node, died
                source.start(self._requests[number])
            else:
                ended = row["state"] != "running"
                reports.append(Group(number, 0, row["finished"], row["lost"], row["seconds"], ended))
        self._groups.note(reports, served)
        before, self._looked = self._looked, running_time.now()
        self._paced_s += self._paced * (self._looked - before)

    def _progress(self) -> str:
        groups = self._groups.groups.values()
        ended, running = sum(group.ended for group in groups), sum(bool(group.seconds) for group in groups)
        return f"{ended} groups ended, {running} running, {len(groups) - ended - running} waiting"

    def _read(
        self, source: NodeSource, chosen: Sequence[Group], by_group: dict[int, Collected], failed: list[CollectionEnd]
    ) -> bool:
        """Read the rollouts of groups; end running groups first. Return False if a group is lost altogether."""
        for group in chosen:
            request = self._requests[group.number]
            if group.number in by_group:
                continue
            if not group.ended:
                source.end_early(request)
            try:
                by_group[group.number] = source.read(request)
            except CollectionFailed as error:
                if too_many_lost(error.end.lost, request) is None:
                    raise
                failed.append(error.end)
                self._groups.take([group])
                del self._requests[group.number]
        end = merge_ends([*(each.end for each in by_group.values()), *failed])
        most = self._groups.tasks * self._groups.rollouts
        if len(end.lost) > self._config.max_lost_share * most:
            raise CollectionFailed(f"{losses(end.lost, most)} (collection.max_lost_share)", end)
        return all(group.number in by_group for group in chosen)

    def _note_taken(self, iteration: int, chosen: Sequence[Group], taken: Sequence[Collected]) -> None:
        lines = []
        for group, collected in zip(chosen, taken, strict=True):
            if group.number not in self._taken:
                versions = sorted({version for rollout in collected.rollouts for version in rollout.policy_versions})
                named = {"group": self._requests[group.number].id, "iteration": iteration, "versions": versions}
                lines.append(json.dumps({"taken": named}))
        self._note(lines)
        self._taken = []

    def _note(self, lines: Iterable[str]) -> None:
        if lines := list(lines):
            with writing(self._log.path):
                self._log.append(lines)


def _reprefilled(rollout: Rollout) -> int:
    """Count the prompt tokens that were computed again because the policy version changed since the turn before."""
    turns = zip(rollout.turns, rollout.turns[1:], strict=False)
    return sum(
        max(0, now.start - now.cached_tokens) for before, now in turns if now.policy_version != before.policy_version
    )
