"""Graders of a program's episode: the world it acted in, a command, or the program's own word."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_environments.harness.program import run_program
from agent_environments.harness.words import require_program, require_script, resolved
from agent_environments.protocol import Environment, Grade
from loop_plumbing.written_tree import open_folder

GRADE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class EndedEpisode:
    """A grader's input after an episode: the task, the program's folder, the world, and the stated reward."""

    task_id: str
    folder: Path
    world: Environment | None
    stated_reward: float | None


class Grader:
    """Grade an episode with the world in which the program acted.

    ``takes_word`` says whether the reward that the program states is the episode's reward.
    """

    takes_word = False

    def check(self) -> None:
        """Raise FileNotFoundError if the grader is missing; a world as grader is checked when it opens."""

    async def grade(self, episode: EndedEpisode) -> Grade:
        """Return the grade of an episode whose program has ended."""
        assert episode.world is not None, "its pool has a world"
        return await episode.world.grade()


class GradedByWord(Grader):
    """Grade an episode with the reward that its program stated."""

    takes_word = True

    async def grade(self, episode: EndedEpisode) -> Grade:
        """Return the reward that the program stated; an episode without a stated reward is ungradable."""
        if episode.stated_reward is None:
            return Grade.of_ungradable("the harness ended without a reward")
        return Grade(episode.stated_reward, success=episode.stated_reward == 1.0)


class GradedByCommand(Grader):
    """Grade an episode with a command, whose last line of output is ``{"reward": ...}``. The command runs in the folder
    where the node was started, so a bare name is never an agent's file. ``EPISODE_FOLDER`` is the program's folder."""

    def __init__(self, command: Sequence[str]) -> None:
        self._here = Path.cwd()
        program, *rest = resolved(command)
        self._command = [os.path.abspath(shutil.which(program) or program), *rest]

    def check(self) -> None:
        """Check that the command exists, before any agent has started.

        Raises:
            FileNotFoundError: the program or script does not exist.
        """
        require_program("grade_command", self._command)
        require_script("grade_command", self._command, "it starts where the node does", [self._here])

    async def grade(self, episode: EndedEpisode) -> Grade:
        """Return the reward in the command's last line; the episode is ungradable if that line holds no reward."""
        if not all(map(open_folder, (episode.folder.parent, episode.folder))):
            return Grade.of_ungradable(
                "the program has removed the folder that is graded, or put something in its place"
            )
        variables = {"TASK_ID": episode.task_id, "EPISODE_FOLDER": str(episode.folder)}
        ended = await run_program(self._command, variables, self._here, GRADE_TIMEOUT_S, answers=True)
        if ended.status != 0:
            return Grade.of_ungradable(f"the grade command ended with {ended.status}: {ended.output[-200:]!r}")
        try:
            verdict = json.loads(ended.answer)
            reward = float(verdict["reward"])
            return Grade(reward, bool(verdict.get("success", reward == 1.0)))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            last = (ended.answer or ended.output)[-200:]
            return Grade.of_ungradable(f'the grade command did not end with {{"reward": ...}}: {last!r}')
