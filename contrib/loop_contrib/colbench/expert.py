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
    """Return the message that gives ``code`` as the final answer and so ends the episode."""
    return f"{ANSWER_MARK}\n{code}"


def expert_play(task: ColBenchTask) -> list[str]:
    """Return the expert's messages: a question for each particular, then the reference code as the answer."""
    return [*(QUESTIONS[particular.topic] for particular in task.particulars), final_message(task.reference)]


def hasty_play(task: ColBenchTask, questions: int = 0) -> list[str]:
    """Return the messages of a flawed play: the first questions only, then an answer that guesses the rest."""
    asked = task.particulars[:questions]
    return [*(QUESTIONS[particular.topic] for particular in asked), final_message(code_knowing(task, asked))]
