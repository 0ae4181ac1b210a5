"""The facts of a task that only its grader may know: a reference solution, the code that a human has in mind.

A critic may see it in training (SWEET-RL, arXiv 2503.15478, section 4); no prompt holds it. The trainer builds what
knows it, from the dataset: it is not a part of the environment that an agent talks to.
"""

from __future__ import annotations

from typing import Protocol


class HiddenInformation(Protocol):
    """Knows the tasks of one dataset."""

    def hidden_information(self, task_id: str) -> str:
        """Return the text for one task; empty for a task without any.

        Raises:
            UnknownTask: the dataset has no such task, or keeps nothing of it.
        """
