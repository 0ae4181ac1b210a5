"""Counts how much an agent asks before it answers, in the texts of its turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from agent_environments.agent_turns import AgentTurn
from agent_environments.colbench.human import DOES_NOT_KNOW
from agent_environments.colbench.pool import ANSWER_MARK

QUESTION_FIGURES: dict[str, str] = {
    "questions": "questions per rollout before the answer",
    "questions_unknown": "share of questions to which the human knew no answer",
}
"""Name -> meaning, of what :func:`question_metrics` gives."""


def is_conversation(messages: Sequence[Mapping[str, str]]) -> bool:
    """Whether the policy was told how it gives its answer in ColBench."""
    return bool(messages) and messages[0]["role"] == "system" and ANSWER_MARK in messages[0]["content"]


def question_metrics(episodes: Iterable[Sequence[AgentTurn]]) -> dict[str, float]:
    """The figures of :data:`QUESTION_FIGURES` over the turns of ColBench's episodes; {} if there are none.

    A question is a turn that the human answered: what is said to the agent's own answer is empty. The share is left out
    where nobody asked.
    """
    rollouts = questions = unknown = 0
    for turns in episodes:
        answers = [turn.observation for turn in turns if turn.observation]
        rollouts += 1
        questions += len(answers)
        unknown += answers.count(DOES_NOT_KNOW)
    if not rollouts:
        return {}
    shares = {"questions_unknown": unknown / questions} if questions else {}
    return {"questions": questions / rollouts, **shares}
