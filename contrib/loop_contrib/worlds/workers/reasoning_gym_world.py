"""Questions of the package ``reasoning-gym``: each task is an entry of one of its datasets, answered in one turn.

    python reasoning_gym_world.py MEMORY_MB '{"dataset": "chain_sum", "size": 500, "seed": 0, ...}' SOCKET

The instructions are one of the package's prompts or a user's text. Where they speak of the tags <answer>, the answer is
what the package finds in them, else it is the whole turn; its score is the package's own. The dataset draws an entry
from its seed and its number alone, so the same config has the same tasks.

Some datasets evaluate an answer as an expression of Python. So a process is sealed before it scores one, and ends with
its episode: the answer reaches no file, no process and no network, and nothing of it is left to the next one. Whoever
writes such an answer can still have it worth anything, as it is evaluated where its score is made.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(
    next(
        str(above / "agent_environments/sandbox")
        for above in Path(__file__).parents
        if (above / "agent_environments").is_dir()
    )
)

import opened_files
import reasoning_gym
import sandbox
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer
from worker_loop import Step, serve

SCORING_MB = 1024
"""What the scoring of an answer may allocate."""


class Question:
    """One entry. It is scored as it is answered, so that a score that raises is told as what it is."""

    def __init__(self, dataset, entry, tagged: bool, level: str) -> None:
        self._dataset, self._entry, self._tagged, self._level = dataset, entry, tagged, level
        self._score = 0.0
        self.opening = entry["question"]

    def step(self, command: str) -> Step:
        answer = extract_answer(command) if self._tagged else command.strip()
        opened_files.install()
        sandbox.confine({"level": self._level, "memory_mb": SCORING_MB})
        self._score = float(self._dataset.score_answer(answer=answer, entry=self._entry))
        return Step("", done=True)

    def grade(self) -> tuple[float, bool]:
        return self._score, self._score >= 1.0

    def close(self) -> None:
        """Nothing to end."""


class ReasoningGymWorld:
    def __init__(
        self, dataset: str, size: int, seed: int, options: dict, instructions: str, sandbox_minimum: str
    ) -> None:
        self._level = sandbox.probe()
        if sandbox.LEVELS.index(self._level) < sandbox.LEVELS.index(sandbox_minimum):
            raise PermissionError(
                f"the strongest sandbox that works here is {self._level!r}, below sandbox_minimum {sandbox_minimum!r}: "
                "the kernel, or the container, refuses seccomp filters; or lower sandbox_minimum"
            )
        self.instructions = SYSTEM_PROMPTS.get(instructions, instructions).strip()
        self._tagged = "<answer>" in self.instructions
        self._dataset = reasoning_gym.create_dataset(dataset, size=size, seed=seed, **options)
        self._numbers = {f"{dataset}_{number}": number for number in range(size)}

    def tasks(self) -> dict[str, list[str]]:
        return {"train": list(self._numbers)}

    def start(self, task: str) -> Question:
        return Question(self._dataset, self._dataset[self._numbers[task]], self._tagged, self._level)

    def expert(self, task: str) -> list[str]:
        answer = self._dataset[self._numbers[task]]["answer"]
        return [f"<answer>{answer}</answer>" if self._tagged else answer]


if __name__ == "__main__":
    serve(lambda: ReasoningGymWorld(**json.loads(sys.argv[2])))
