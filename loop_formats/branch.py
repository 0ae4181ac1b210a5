"""Starts an episode in the middle of a stored rollout instead of at its task's opening.

A branch carries that rollout's opening, its actions with the observations that answered them, and its token ids as they
were served. So any node can go on from it, whichever node sampled it and wherever its log is now, and a collection's
request still says everything that its rollouts depend on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt
from pydantic.dataclasses import dataclass

from agent_environments.protocol import Message
from loop_formats.rollout import BranchOf, Rollout
from loop_formats.schema import STRICT, require


@dataclass(frozen=True, config=STRICT)
class Exchange:
    """A turn as the environment saw it."""

    action: str
    observation: str


@dataclass(frozen=True, config=STRICT)
class BranchPoint:
    """The point in an episode after ``turns`` turns; they fill the episode's first ``tokens`` token ids."""

    turns: NonNegativeInt
    tokens: Annotated[int, Field(ge=2)]


@dataclass(frozen=True, config=STRICT)
class Branch:
    """Points of one stored rollout; new episodes go on from these points.

    Shapes: ``token_ids`` is [s], the served ids up to the last point; ``exchanges`` is [t], the turns up to it.
    """

    rollout_id: str
    task_id: str
    dataset: str
    opening: list[Message]
    exchanges: list[Exchange]
    token_ids: list[NonNegativeInt]
    points: list[BranchPoint]

    def __post_init__(self) -> None:
        require(self.points, "points must be at least one")
        turns = [point.turns for point in self.points]
        require(len(set(turns)) == len(turns), "points must be distinct (ask for more rollouts_per_task instead)")
        require(max(turns) <= len(self.exchanges), f"points go beyond the {len(self.exchanges)} exchanges")
        longest = max(point.tokens for point in self.points)
        require(longest <= len(self.token_ids), f"points go beyond the {len(self.token_ids)} token_ids")

    @classmethod
    def of(cls, rollout: Rollout, turns: Iterable[int]) -> Branch:
        """Return the points of ``rollout`` where these turns begin, counted from 0 at its episode's beginning.

        Raises:
            ValueError: the rollout did not sample the turn, has no token ids, or is one of several sequences.
        """
        if rollout.text_only:
            raise ValueError(
                f"rollout {rollout.rollout_id} has no token ids to go on from: it was spoken by an endpoint"
            )
        if rollout.segments > 1:
            raise ValueError(
                f"episode {rollout.episode_id} is {rollout.segments} sequences; only one can be gone on from"
            )
        wanted, before = sorted(set(turns)), rollout.turns_before
        most = before + len(rollout.turns) - 1
        for turn in wanted:
            if not before <= turn <= most:
                own = f"rollout {rollout.rollout_id} sampled turns {before} to {most}, not turn {turn}"
                parent = f"; branch {rollout.branch_of.rollout_id}, which it goes on from" if rollout.branch_of else ""
                raise ValueError(own + (parent if turn < before else ""))
        points = [BranchPoint(turn, rollout.turns[turn - before].start) for turn in wanted]
        # A prompt may hold assistant messages of its own, so the episode's are counted from the end.
        spoken = [place for place, message in enumerate(rollout.messages) if message["role"] == "assistant"]
        first = spoken[len(spoken) - most - 1]
        texts = [message["content"] for message in rollout.messages[first:]]
        last = max(wanted, default=0)
        return cls(
            rollout_id=rollout.rollout_id,
            task_id=rollout.task_id,
            dataset=rollout.dataset,
            opening=[Message(**message) for message in rollout.messages[:first]],  # type: ignore[arg-type]
            exchanges=[Exchange(*texts[2 * turn : 2 * turn + 2]) for turn in range(last)],
            token_ids=rollout.token_ids[: points[-1].tokens] if points else [],
            points=points,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; the lists of tokens are the branch's own objects, not copies."""
        # Not asdict, as in Rollout.to_dict.
        nested = {key: [{**vars(each)} for each in getattr(self, key)] for key in ("opening", "exchanges", "points")}
        return {**vars(self), **nested}

    def starts(self) -> list[BranchStart]:
        """Return a start for each point."""
        return [BranchStart(self, point) for point in self.points]


@dataclasses.dataclass(frozen=True)
class BranchStart:
    """The point of a branch that one episode goes on from."""

    branch: Branch
    point: BranchPoint

    @property
    def origin(self) -> BranchOf:
        """Return the origin for the new rollout's record."""
        return BranchOf(self.branch.rollout_id, self.point.turns)

    @property
    def exchanges(self) -> list[Exchange]:
        """Return the turns to replay."""
        return self.branch.exchanges[: self.point.turns]

    @property
    def token_ids(self) -> list[int]:
        """Return the served token ids; sampling goes on after them."""
        return self.branch.token_ids[: self.point.tokens]
