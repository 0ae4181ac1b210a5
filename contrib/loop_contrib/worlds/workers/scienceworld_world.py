"""ScienceWorld (the package ``scienceworld``, with Java): experiments of elementary school science in a house.

    python scienceworld_world.py MEMORY_MB

A task is one of 30 and a variation, ``<task>_<variation>``, in the package's own splits; the simplifications are the
package's "easy" (AgentGym has none). Reruns may differ: in some tasks the order of things in a place, and temperatures,
do not follow from the seed. The reward is the world's own score, which counts sub-goals; a wrong final answer makes it
0. The package's ``step`` also lists all valid actions, at a tenth of a second a step, so its server is asked directly.
"""

from __future__ import annotations

import json
from pathlib import Path

from scienceworld import ScienceWorldEnv
from worker_loop import Step, WorkerEpisode, serve

SIMPLIFICATIONS = "easy"
VARIATIONS = json.loads(Path(__file__).with_name("scienceworld_variations.json").read_text())
"""Task -> where train, dev and test end in its variations, as the package says, which needs a second a task."""

INSTRUCTIONS = """\
You are in a house with a laboratory and do an experiment. The commands you can use:
- look around, look at <object>, look in <container>, inventory, task
- open <door>, close <door>, go to <place>, teleport to <place>
- pick up <object>, put down <object>, move <object> to <container>
- pour <liquid> in <container>, dunk <object> in <liquid>
- activate <device>, deactivate <device>, connect <object> to <object>, disconnect <object>, use <object> on <object>
- mix <container>, eat <object>, flush <object>, read <object>, focus on <object>, wait, wait1
"focus on" says which object the task is about; focusing on a wrong one ends the episode.
When a command means several things, the answer is a numbered list: reply with a number."""


class ScienceWorldEpisode(WorkerEpisode):
    """An experiment. The package runs one at a time in its JVM; the world keeps the JVM for the next experiment."""

    def __init__(self, machine: ScienceWorldEnv, task: str, gold_path: bool = False) -> None:
        name, _, variation = task.partition("_")
        machine.load(name, int(variation), SIMPLIFICATIONS, generateGoldPath=gold_path)
        self._server = machine.server
        self._server.reset()
        self._server.step("look around")
        self.opening = f"{self._server.freeActionTaskDesc().strip()}\n\n{self._server.freeActionLook().strip()}"

    def step(self, command: str) -> Step:
        observation = self._server.step(command).strip()
        over = self._server.getCompleted() or self._server.getScore() < 0
        # The second is its answer to what is not a number where it asked for one.
        failed = observation.startswith(("No known action", "Unknown action"))
        return Step(observation, done=bool(over), failed=failed)

    def grade(self) -> tuple[float, bool]:
        score = float(self._server.getScore())
        return min(1.0, max(0.0, score)), score >= 1.0


class ScienceWorldWorld:
    forkable = False  # it starts a Java machine
    instructions = INSTRUCTIONS

    def __init__(self) -> None:
        self._machine = ScienceWorldEnv()

    def tasks(self) -> dict[str, list[str]]:
        splits: dict[str, list[str]] = {"train": [], "dev": [], "test": []}
        for name, ends in VARIATIONS.items():
            first = 0
            for split, end in zip(splits, ends, strict=True):
                splits[split] += [f"{name}_{variation}" for variation in range(first, end)]
                first = end
        return splits

    def start(self, task: str) -> ScienceWorldEpisode:
        return ScienceWorldEpisode(self._machine, task)

    def expert(self, task: str) -> list[str]:
        """Return the commands of the task's gold path."""
        ScienceWorldEpisode(self._machine, task, gold_path=True)
        return self._machine.get_gold_action_sequence()


if __name__ == "__main__":
    serve(ScienceWorldWorld)
