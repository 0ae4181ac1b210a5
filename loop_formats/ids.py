"""Writes and reads the ids of collections and rollouts.

<run>-i0007-<10 hex digits>  the rollouts that iteration 7 trains on; the digits hash the request and the adapter
<run>-i0007-r2-<10 hex digits>  the tasks asked for in a second round, in place of those without signal (refill)
<run>-i0007-g123-<10 hex digits>  group 123 of a stream, asked for in iteration 7
<run>-i0007-dev-<10 hex digits>  the dev tasks, by the policy as it is after iteration 7
<collection>-1of2            the share of the first of two rollout nodes
eval-<policy>-t<temperature>-<10 hex digits>  one score of an evaluation; the digits hash its protocol
branch-<collection>-<10 hex digits>  rollouts that go on from those of a collection; the digits hash the request
<run>-t0.35-a003             attempt 3 at the tasks that the run has not solved at temperature 0.35
<collection>-<8 hex digits>  some rollouts of it, played again by themselves; the digits hash which, and the try
<collection>/<task>/<index>.<attempt>      a rollout
<rollout>/<n>                a further sequence of its episode, n from 1
<p>:<rollout>@<n>            turn n (from 0) of its episode by itself, in pair p (from 0) of a set of pairs
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

_ITERATION = re.compile(r"(.+)-i(\d+)(?:-(dev|[rg]\d+))?(?:-[0-9a-f]{10})?(?:-(\d+of\d+))?")
_BRANCH = re.compile(r"branch-(.+)-[0-9a-f]{10}(?:-\d+of\d+)?")
_EVALUATION = re.compile(r"(eval-((.+?)(?:-t([\d.]+))?)-[0-9a-f]{10})(?:-[0-9a-f]{8})?(?:-\d+of\d+)?")

MAX_BRANCHED = 90
"""Characters of a collection's id that the id of its branches keeps."""


@dataclass(frozen=True)
class CollectionName:
    """The parts of a collection's id. ``name`` is that of the run or evaluation, or of the collection that was
    branched; ``iteration`` is None outside training; ``refill`` is the round in which it replaces tasks of its
    iteration, 0 for the iteration's first; ``group`` is the number of a stream's group; ``share`` is "1of2" for the
    share of the first of two nodes. ``score`` is the id of an evaluation's score, also where some of its rollouts were
    requested by themselves; ``policy`` and ``temperature`` are those in its name."""

    name: str
    iteration: int | None = None
    refill: int = 0
    group: int | None = None
    dev: bool = False
    branch: bool = False
    share: str | None = None
    score: str | None = None
    policy: str = ""
    temperature: str = ""

    @property
    def is_training(self) -> bool:
        """Return whether the collection's rollouts are trained on."""
        return self.iteration is not None and not self.dev

    @property
    def is_score(self) -> bool:
        """Return whether the rollouts score a policy, on dev or in an evaluation; no run may learn from them."""
        return self.dev or self.score is not None


def id_part(text: str) -> str:
    """Return a text as a readable part of an id: letters, digits, . _ -, at most 60 of them."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text).lstrip("._-")[:60] or "unnamed"


def training_id(run: str, iteration: int, protocol: str, refill: int = 0) -> str:
    """Return the id of a collection that an iteration trains on; ``protocol``: the rollouts' settings, as text."""
    round_ = f"-r{refill}" if refill else ""
    return f"{run}-i{iteration:04d}{round_}-{_hash(protocol, 10)}"


def group_id(run: str, iteration: int, protocol: str, group: int) -> str:
    """Return the id of a stream's group, requested in ``iteration``; ``protocol`` as in :func:`training_id`."""
    return f"{run}-i{iteration:04d}-g{group}-{_hash(protocol, 10)}"


def dev_id(run: str, iteration: int, protocol: str) -> str:
    """Return the id of the dev evaluation of the policy after ``iteration``; ``protocol`` as in :func:`training_id`."""
    return f"{run}-i{iteration:04d}-dev-{_hash(protocol, 10)}"


def share_id(collection_id: str, number: int, count: int) -> str:
    """Return the id of the ``number``-th (from 1) of ``count`` parts of a collection."""
    return f"{collection_id}-{number}of{count}"


def evaluation_id(name: str, protocol: str) -> str:
    """Return the id of a score; ``protocol``: all settings of its result, as text; ``name`` may be any text."""
    return f"eval-{id_part(name)}-{_hash(protocol, 10)}"


def branch_id(collection_id: str, protocol: str) -> str:
    """Return the id of rollouts that continue some of ``collection_id``; ``protocol``: their settings, as text."""
    return f"branch-{collection_id[:MAX_BRANCHED]}-{_hash(protocol, 10)}"


def search_id(run: str, temperature: float, attempt: int) -> str:
    """Return the id of an attempt (from 1) at all unsolved tasks; the temperature is written with two decimals."""
    return f"{run}-t{temperature:.2f}-a{attempt:03d}"


def replay_id(collection_id: str, protocol: str) -> str:
    """Return the id of a replay of a collection's rollouts; ``protocol`` names the rollouts and counts the replay."""
    return f"{collection_id}-{_hash(protocol, 8)}"


def parse_collection_id(collection_id: str) -> CollectionName:
    """Return the parts of an id; an id of another form becomes a ``name`` without further parts."""
    if match := _BRANCH.fullmatch(collection_id):
        return CollectionName(match[1], branch=True)
    if match := _EVALUATION.fullmatch(collection_id):
        return CollectionName(match[2], score=match[1], policy=match[3], temperature=match[4] or "")
    if match := _ITERATION.fullmatch(collection_id):
        kind, number = (match[3] or "")[:1], (match[3] or "")[1:]
        refill, group = int(number) if kind == "r" else 0, int(number) if kind == "g" else None
        return CollectionName(match[1], int(match[2]), refill, group, dev=kind == "d", share=match[4])
    return CollectionName(collection_id)


def rollout_id(collection_id: str, task_id: str, index: int, attempt: int) -> str:
    """Return the id of attempt ``attempt`` (from 0) at the ``index``-th rollout of a task."""
    return f"{collection_id}/{task_id}/{index}.{attempt}"


def task_of(rollout_id: str) -> str:
    """Return the part of a rollout's id that all rollouts of the task in the collection share; "" for another id."""
    return rollout_id.rpartition("/")[0]


def segment_id(episode_id: str, segment: int) -> str:
    """Return the id of the ``segment``-th sequence (from 0) of an episode; the first has the episode's own id."""
    return episode_id if segment == 0 else f"{episode_id}/{segment}"


def paired_turn_id(pair: int, rollout_id: str, turn: int) -> str:
    """Return the id of a turn (from 0) that is learned from by itself. The id contains the pair's number (from 0),
    because a turn may be in several pairs."""
    return f"{pair}:{rollout_id}@{turn}"


def _hash(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
