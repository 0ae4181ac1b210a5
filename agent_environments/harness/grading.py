"""Who grades what a program did: the world it acted in, a command, or the program's own word."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agent_environments.harness.program import INHERITED, run_program
from agent_environments.harness.words import found, require_program, require_script, run_from_folder
from agent_environments.protocol import Environment, Grade
from loop_plumbing.written_tree import open_folder

_THE_AGENTS = "in the episode's folder it would be the agent's: give its path"
GRADE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class EndedEpisode:
    """What a grader may look at: the task, the folder that the program had, its world, and the reward it stated."""

    task_id: str
    folder: Path
    world: Environment | None
    stated_reward: float | None


class Grader(Protocol):
    """Grades episodes of programs. ``takes_word``: the reward that the program states is its reward."""

    takes_word: bool

    def check(self) -> None:
        """Raise FileNotFoundError where the grader is not there."""

    async def grade(self, episode: EndedEpisode) -> Grade:
        """Return the grade of an episode whose program has ended."""


class GradedByWorld:
    """The world that the program acted in grades."""

    takes_word = False

    def check(self) -> None:
        """The world checks itself when it opens."""

    async def grade(self, episode: EndedEpisode) -> Grade:
        """Return the world's grade."""
        assert episode.world is not None, "its pool has a world"
        return await episode.world.grade()


class GradedByWord:
    """The program's own reward is taken."""

    takes_word = True

    def check(self) -> None:
        """There is nothing to look for."""

    async def grade(self, episode: EndedEpisode) -> Grade:
        """Return the reward that the program stated; an episode without one cannot be graded."""
        if episode.stated_reward is None:
            return Grade.of_ungradable("the harness ended without a reward")
        return Grade(episode.stated_reward, success=episode.stated_reward == 1.0)


class GradedByCommand:
    """A command grades: it prints ``{"reward": ...}`` in its last line. It runs in the folder that the program had."""

    takes_word = False

    def __init__(self, command: Sequence[str]) -> None:
        program, *rest = found(command)
        self._command = [os.path.abspath(shutil.which(program) or program), *rest]
        word = run_from_folder(self._command)
        self._runs_agents = word and f"harness: grade_command: there is no file {word!r} here; {_THE_AGENTS}"

    def check(self) -> None:
        """Check that the command is there, before any agent has started.

        Raises:
            FileNotFoundError: there is no such program, or a file of the grader's would be looked for in the folder
                that the agent wrote.
        """
        require_program("grade_command", self._command)
        if self._runs_agents or not all(os.path.exists(word) for word in self._command if os.path.isabs(word)):
            require_script("grade_command", self._command, _THE_AGENTS)
        if self._runs_agents:
            raise FileNotFoundError(self._runs_agents)

    async def grade(self, episode: EndedEpisode) -> Grade:
        """Return the reward of the command's last line; where it has none the episode cannot be graded."""
        if self._runs_agents:
            return Grade.of_ungradable(self._runs_agents)
        if not all(map(open_folder, (episode.folder.parent, episode.folder))):
            return Grade.of_ungradable(
                "the program has removed the folder that is graded, or put something in its place"
            )
        variables = {"TASK_ID": episode.task_id, "EPISODE_FOLDER": str(episode.folder), **_nothing_from_here()}
        ended = await run_program(self._command, variables, episode.folder, GRADE_TIMEOUT_S, answers=True)
        if ended.status != 0:
            return Grade.of_ungradable(f"the grade command ended with {ended.status}: {ended.output[-200:]!r}")
        try:
            verdict = json.loads(ended.answer)
            reward = float(verdict["reward"])
            return Grade(reward, bool(verdict.get("success", reward == 1.0)))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            last = (ended.answer or ended.output)[-200:]
            return Grade.of_ungradable(f'the grade command did not end with {{"reward": ...}}: {last!r}')


def _nothing_from_here() -> dict[str, str]:
    """Variables by which nothing is looked for in the folder that a program starts in: a json.py there could print a
    reward. An empty entry is that folder."""
    paths = {name: os.environ.get(name, "").split(os.pathsep) for name in INHERITED if name.endswith("PATH")}
    absolute = {name: os.pathsep.join(filter(os.path.isabs, entries)) for name, entries in paths.items()}
    return {**absolute, "PYTHONSAFEPATH": "1"}
