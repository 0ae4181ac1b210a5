"""The behaviour metrics of the LOOP paper's appendix A.1, and API-call sequences, over any set of rollouts.

Input is text only: the agent's turns (:mod:`agent_environments.agent_turns`) in one episode, with what answered them.
Where an episode has several sequences, these are the turns of all of them, so that a call which failed in one and
succeeds in another has recovered. What the paper leaves open is decided here once:

- A turn counts in "number of turns" when the environment answered it ("agent submissions followed by environment
  responses"); the per-turn shares divide by that number and only look at those turns. Counts of text (code
  characters, `show_api_doc`, assume, dummy) look at every agent turn, answered or not.
- A code block is what the adapter runs as one (agent_environments.extraction): fenced, marked python or py, a last
  block that was cut off before its closing fence included; the line breaks at its two ends are not counted as
  characters.
- An endpoint is attempted where a block names `apis.<app>.<api>`, whether it is called on the spot or handed on.
- Strings are counted as the paper writes them: lower case, `assumed` once, `assumes` as an occurrence of `assume`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from agent_environments.agent_turns import AgentTurn

_ENDPOINT = re.compile(r"\bapis\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)")
_SHOW_API_DOC = re.compile(r"\bapis\.api_docs\.show_api_doc\s*\(")
_ASSUME = re.compile(r"assum(?:e|ing)")  # "assume" also finds "assumed", once


@dataclass(frozen=True)
class RolloutBehavior:
    """Counts of one rollout; their sums over rollouts are all that the aggregate figures need."""

    turns: int
    code_characters: int
    multiple_cell_turns: int
    failed_turns: int
    failed_calls: int
    recovered_calls: int
    show_api_doc_calls: int
    assume: int
    dummy: int


@dataclass(frozen=True)
class Behavior:
    """Appendix A.1 over ``rollouts`` rollouts; ``give_up_rate`` is None where no call failed.

    :data:`BEHAVIOR_FIGURES` says what each means.
    """

    rollouts: int
    turns: float
    code_characters: float
    multiple_cells_per_turn: float
    execution_errors_per_turn: float
    give_up_rate: float | None
    show_api_doc: float
    assume: float
    dummy: float

    def as_metrics(self, prefix: str = "behavior_") -> dict[str, float]:
        """Flat names for a metric logger; a rate that is not defined is left out."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {f"{prefix}{name}": float(value) for name, value in values.items() if value is not None}


BEHAVIOR_FIGURES: dict[str, tuple[str, str]] = {
    "turns": ("turns per rollout", "agent turns that were answered, per rollout"),
    "code_characters": ("code characters per rollout", "characters of code per rollout"),
    "multiple_cells_per_turn": ("turns with several code cells", "share of turns with more than one code block"),
    "execution_errors_per_turn": ("execution errors per turn", "share of turns whose code failed"),
    "give_up_rate": (
        "failed-call give-up rate",
        "share of failed API endpoints that were not called successfully later on",
    ),
    "show_api_doc": ("show_api_doc calls per rollout", "show_api_doc calls per rollout"),
    "assume": ("'assume' per rollout", "occurrences of assume, assumed, assuming per rollout"),
    "dummy": ("'dummy' per rollout", "occurrences of dummy per rollout"),
}
"""The figures of :class:`Behavior` by their names there: (title in tables and pictures, meaning)."""


def give_up_counts(turns: Iterable[AgentTurn]) -> tuple[int, int]:
    """(failed, recovered) of one rollout, appendix A.1's steps 3(a) to 3(d).

    A turn whose execution failed adds the endpoints it attempted to the set of failed ones, and ``failed`` counts
    those newly added; any other turn removes its endpoints from the set, and ``recovered`` counts those removed. An
    endpoint that fails again after it has recovered is counted anew.
    """
    failing: set[str] = set()
    failed = recovered = 0
    for turn in turns:
        attempted = set(_endpoints(turn))
        if turn.failed:
            failed += len(attempted - failing)
            failing |= attempted
        else:
            recovered += len(attempted & failing)
            failing -= attempted
    return failed, recovered


def rollout_behavior(turns: Sequence[AgentTurn]) -> RolloutBehavior:
    """Count one episode."""
    answered = [turn for turn in turns if turn.observation is not None]
    failed, recovered = give_up_counts(answered)
    return RolloutBehavior(
        turns=len(answered),
        code_characters=sum(len(block) for turn in turns for block in turn.blocks),
        multiple_cell_turns=sum(len(turn.blocks) > 1 for turn in answered),
        failed_turns=sum(turn.failed for turn in answered),
        failed_calls=failed,
        recovered_calls=recovered,
        show_api_doc_calls=sum(len(_SHOW_API_DOC.findall(block)) for turn in turns for block in turn.blocks),
        assume=sum(len(_ASSUME.findall(turn.text)) for turn in turns),
        dummy=sum(turn.text.count("dummy") for turn in turns),
    )


def aggregate(rollouts: Sequence[RolloutBehavior]) -> Behavior:
    """The figures of appendix A.1 over a set of rollouts.

    Raises:
        ValueError: the set is empty.
    """
    if not rollouts:
        raise ValueError("behaviour metrics need at least one rollout")

    def total(name: str) -> int:
        return sum(getattr(rollout, name) for rollout in rollouts)

    count, turns, failed = len(rollouts), total("turns"), total("failed_calls")
    return Behavior(
        rollouts=count,
        turns=turns / count,
        code_characters=total("code_characters") / count,
        multiple_cells_per_turn=total("multiple_cell_turns") / max(turns, 1),
        execution_errors_per_turn=total("failed_turns") / max(turns, 1),
        give_up_rate=(failed - total("recovered_calls")) / failed if failed else None,
        show_api_doc=total("show_api_doc_calls") / count,
        assume=total("assume") / count,
        dummy=total("dummy") / count,
    )


def api_calls(turns: Iterable[AgentTurn]) -> tuple[str, ...]:
    """The endpoints an agent named, in order: the sequence by which rollouts of one task are compared."""
    return tuple(call for turn in turns for call in _endpoints(turn))


def _endpoints(turn: AgentTurn) -> list[str]:
    """``app.api`` as named in its blocks, in order, with repetitions."""
    return [f"{app}.{api}" for block in turn.blocks for app, api in _ENDPOINT.findall(block)]
