"""Play of generated tasks for demonstrations and benchmarks: an expert who asks, and one that answers early."""

from __future__ import annotations

from loop_contrib.colbench.generator import code_knowing
from loop_contrib.colbench.pool import ANSWER_MARK
from loop_contrib.colbench.task import ColBenchTask

QUESTIONS = {
    "field": "What is the field called?",
    "limit": "What is the limit?",
    "boundary": "Is that inclusive?",
    "default": "What does a missing value count as?",
    "rounding": "How do I round?",
    "unit": "Which unit do you want?",
    "tie": "Who wins a tie?",
}
"""Topic -> the question that the scripted human answers with this particular and no other."""


def final_message(code: str) -> str:
    """Return the message that ends an episode with this code."""
    return f"{ANSWER_MARK}\n{code}"


def expert_play(task: ColBenchTask) -> list[str]:
    """Ask for each particular, then answer with the reference."""
    return [*(QUESTIONS[particular.topic] for particular in task.particulars), final_message(task.reference)]


def hasty_play(task: ColBenchTask, questions: int = 0) -> list[str]:
    """Play the flaw to unlearn: answer after the first so many questions, with a guess of what was not asked for."""
    asked = task.particulars[:questions]
    return [*(QUESTIONS[particular.topic] for particular in asked), final_message(code_knowing(task, asked))]
