"""The behaviour metrics of the LOOP paper's appendix A.1, and API-call sequences, over any set of rollouts.

Input is text only: the agent's turns (:mod:`agent_environments.agent_turns`) in one episode, with their observations.
If an episode has several sequences, these are the turns of all of them: a call that failed in one and succeeds in
another has recovered. This file decides the points that the paper leaves open:

- A turn counts in "number of turns" when the environment answered it ("agent submissions followed by environment
  responses"); the per-turn shares divide by that number and only look at those turns. Counts of text (code
  characters, `show_api_doc`, assume, dummy) look at every agent turn, answered or not.
- A code block is a text that the adapter runs as one (agent_environments.extraction): fenced, marked python or py, a
  last block that was cut off before its closing fence included; line breaks at its two ends do not count as characters.
- An endpoint is attempted where a block names `apis.<app>.<api>`, whether it is called on the spot or handed on.
- Strings are counted as the paper writes them: lower case, `assumed` once, `assumes` as an occurrence of `assume`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from agent_environments.agent_turns import AgentTurn
from agent_environments.description import BehaviorFigure, Messages

_ENDPOINT = re.compile(r"\bapis\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)")
_SHOW_API_DOC = re.compile(r"\bapis\.api_docs\.show_api_doc\s*\(")
_ASSUME = re.compile(r"assum(?:e|ing)")  # "assume" also finds "assumed", once


def _figure(name: str, title: str, of: str, **how: Any) -> BehaviorFigure:
    return BehaviorFigure(name, title, of, key=f"behavior_{name}", source="LOOP, appendix A.1", **how)


def _per_turn(name: str, title: str, of: str) -> BehaviorFigure:
    """Build the figure that divides the count ``of`` by the number of answered turns; 0 without such turns."""
    return _figure(name, title, of, per="turns", empty=0.0)


class AppWorldBehavior:
    """Count what the figures of appendix A.1 are computed from."""

    name = "code"
    figures = (
        _figure("turns", "turns per rollout", "turns"),
        _figure("code_characters", "code characters per rollout", "code_characters"),
        _per_turn("multiple_cells_per_turn", "turns with several code cells", "multiple_cell_turns"),
        _per_turn("execution_errors_per_turn", "execution errors per turn", "failed_turns"),
        _figure(
            "give_up_rate",
            "failed-call give-up rate",
            "failed_calls",
            less="recovered_calls",
            per="failed_calls",
            undefined="no call failed",
        ),
        _figure("show_api_doc", "show_api_doc calls per rollout", "show_api_doc_calls"),
        _figure("assume", "'assume' per rollout", "assume"),
        _figure("dummy", "'dummy' per rollout", "dummy"),
    )

    def concerns(self, messages: Messages) -> bool:
        """Return True: any conversation may hold code."""
        return True

    def counts(self, turns: Sequence[AgentTurn]) -> dict[str, int]:
        """Return the counts of one episode."""
        answered = [turn for turn in turns if turn.observation is not None]
        failed, recovered = give_up_counts(answered)
        return {
            "turns": len(answered),
            "code_characters": sum(len(block) for turn in turns for block in turn.blocks),
            "multiple_cell_turns": sum(len(turn.blocks) > 1 for turn in answered),
            "failed_turns": sum(turn.failed for turn in answered),
            "failed_calls": failed,
            "recovered_calls": recovered,
            "show_api_doc_calls": sum(len(_SHOW_API_DOC.findall(block)) for turn in turns for block in turn.blocks),
            "assume": sum(len(_ASSUME.findall(turn.text)) for turn in turns),
            "dummy": sum(turn.text.count("dummy") for turn in turns),
        }

    def calls(self, turns: Sequence[AgentTurn]) -> list[str]:
        """Return the endpoints an agent named, ``app.api``, in order, with repetitions."""
        return [call for turn in turns for call in _endpoints(turn)]


def give_up_counts(turns: Iterable[AgentTurn]) -> tuple[int, int]:
    """Count (failed, recovered) of one rollout, appendix A.1's steps 3(a) to 3(d).

    A turn whose execution failed adds its endpoints to the set of failed endpoints; ``failed`` counts the newly added
    endpoints. Any other turn removes its endpoints from the set; ``recovered`` counts the removed endpoints. An
    endpoint that fails again after it has recovered is counted again.
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


def _endpoints(turn: AgentTurn) -> list[str]:
    """Return each ``app.api`` that the turn's blocks name, in order, with repetitions."""
    return [f"{app}.{api}" for block in turn.blocks for app, api in _ENDPOINT.findall(block)]
