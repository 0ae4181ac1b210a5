"""Counts how much an agent asks before it answers, in the texts of its turns."""

from __future__ import annotations

from collections.abc import Sequence

from agent_environments.agent_turns import AgentTurn
from agent_environments.description import BehaviorFigure, Messages
from loop_contrib.colbench.human import DOES_NOT_KNOW
from loop_contrib.colbench.pool import ANSWER_MARK


class QuestionBehavior:
    """Counts the agent's questions. A question is a turn that the human answered; after the agent's final answer the
    observation is empty."""

    name = "questions"
    figures = (
        BehaviorFigure("questions", "questions per rollout before the answer", "questions"),
        BehaviorFigure(
            "questions_unknown", "share of questions without an answer", "questions_unknown", per="questions"
        ),
    )

    def concerns(self, messages: Messages) -> bool:
        """Return whether the system message asks for an answer in ColBench's form."""
        return bool(messages) and messages[0]["role"] == "system" and ANSWER_MARK in messages[0]["content"]

    def counts(self, turns: Sequence[AgentTurn]) -> dict[str, int]:
        """Return the counts of one episode."""
        answers = [turn.observation for turn in turns if turn.observation]
        return {"questions": len(answers), "questions_unknown": answers.count(DOES_NOT_KNOW)}

    def calls(self, turns: Sequence[AgentTurn]) -> list[str]:
        """Return an empty sequence, because a conversation has no calls."""
        return []
