"""TextWorldExpress (the package ``textworld-express``, with Java): eight kinds of text games.

    python textworldexpress_world.py MEMORY_MB

A task is a game and a seed, ``<game>_<seed>``. The splits are the package's own seeds, 1000 of each game, of which the
first hundred are listed. ``train_following`` and so on are the first forty of the two games in which every command
follows from what was read last. The reward is the game's score, which counts steps on the way.
"""

from __future__ import annotations

from textworld_express import TextWorldExpressEnv
from worker_loop import Step, WorkerEpisode, serve

GAMES = ("cookingworld", "twc", "coin", "mapreader", "arithmetic", "sorting", "simonsays", "peckingorder")
FOLLOWING, FOLLOWING_SEEDS = ("simonsays", "peckingorder"), 40
FIRST_SEED = {"train": 0, "dev": 10_000, "test": 20_000}
SEEDS = 100
STEP_LIMIT = 100

INSTRUCTIONS = """\
You play a text game in a house. Commands are words such as: look around, inventory, take <object>, move <direction>,
open door to <direction>, open <container>, put <object> in <container>, read <object>, eat <object>.
Each answer is followed by the commands that are possible now."""

MAX_LISTED_COMMANDS = 60


class TextWorldExpressEpisode(WorkerEpisode):
    """A game. The package runs one game at a time in its JVM; the world keeps the JVM for the next game."""

    def __init__(self, machine: TextWorldExpressEnv, task: str, gold_path: bool = False) -> None:
        self._machine = machine
        game, _, seed = task.partition("_")
        fold = next(fold for fold, first in reversed(FIRST_SEED.items()) if int(seed) >= first)
        observation, infos = machine.reset(
            seed=int(seed), gameFold=fold, gameName=game, gameParams="", generateGoldPath=gold_path
        )
        self._score, self._solved = 0.0, False
        self.opening = f"{infos['taskDescription'].strip()}\n\n{_with_commands(observation, infos)}"

    def step(self, command: str) -> Step:
        possible = self._machine.runHistory[-1]["validActions"]
        observation, _, done, infos = self._machine.step(command)
        self._score, self._solved = infos["score"], bool(infos["tasksuccess"])
        answer = observation if done else _with_commands(observation, infos)
        return Step(answer, done=bool(done), failed=command not in possible)

    def grade(self) -> tuple[float, bool]:
        return min(1.0, max(0.0, float(self._score))), self._solved


def _with_commands(observation: str, infos: dict) -> str:
    possible = sorted(infos["validActions"])
    more = f" and {len(possible) - MAX_LISTED_COMMANDS} more" if len(possible) > MAX_LISTED_COMMANDS else ""
    return f"{observation.strip()}\n\nPossible commands: {', '.join(possible[:MAX_LISTED_COMMANDS])}{more}"


class TextWorldExpressWorld:
    forkable = False  # it starts a Java machine
    instructions = INSTRUCTIONS

    def __init__(self) -> None:
        self._machine = TextWorldExpressEnv(envStepLimit=STEP_LIMIT)

    def tasks(self) -> dict[str, list[str]]:
        splits = {}
        for split, first in FIRST_SEED.items():
            splits[split] = [f"{game}_{seed}" for seed in range(first, first + SEEDS) for game in GAMES]
            following = range(first, first + FOLLOWING_SEEDS)
            splits[f"{split}_following"] = [f"{game}_{seed}" for seed in following for game in FOLLOWING]
        return splits

    def start(self, task: str) -> TextWorldExpressEpisode:
        return TextWorldExpressEpisode(self._machine, task)

    def expert(self, task: str) -> list[str]:
        """Return the commands of the game's gold path."""
        TextWorldExpressEpisode(self._machine, task, gold_path=True)
        return self._machine.getGoldActionSequence()


if __name__ == "__main__":
    serve(TextWorldExpressWorld)
