"""ColBench's demonstrations: an expert who asks for each particular first, and an agent that answers too early."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agent_environments.protocol import UnknownTask, create_pool
from loop_contrib.colbench import expert, generator
from loop_contrib.colbench.expert import expert_play, hasty_play
from loop_contrib.colbench.generator import FIELDS, code_knowing, guess_of, value_of
from loop_contrib.colbench.pool import ColBenchPool
from loop_contrib.colbench.task import ColBenchTask
from loop_formats.schema import ConfigError
from loop_plumbing.breakage import raised_as
from loop_recipes.warm_start.demonstration import Demonstration, Script
from loop_recipes.warm_start.demonstrator import Demonstrator, draw
from rollout_server.config import EnvironmentConfig

FLAWS = ("answered_at_once", "stopped_asking")
_FIELD = re.compile(r"The field is called (\w+)\.")
_LIMIT = re.compile(r"The limit is (\d+)\.")


def thought(task: ColBenchTask, asked: int) -> str:
    """Return the thought before the final answer: each particular in the human's words, then its value in the code.

    "The limit is 30, so limit: 30." After the first ``asked`` particulars it guesses: "I guess limit: 10."
    """
    known = [f"{one.answer.removesuffix('.')}, so {one.topic}: {value_of(one)}." for one in task.particulars[:asked]]
    guessed = [f"I guess {one.topic}: {guess_of(one.topic)}." for one in task.particulars[asked:]]
    return " ".join([*known, *guessed])


def early_stops(task: ColBenchTask) -> list[int]:
    """Return after how many questions (from 1) the agent can stop so that its guess of the rest is wrong."""
    fewer = range(1, len(task.particulars))
    return [asked for asked in fewer if code_knowing(task, task.particulars[:asked]) != task.reference]


def possible_flaws(task: ColBenchTask) -> list[str]:
    """Return the flaws that a task can show. One is always possible: to guess everything is always wrong."""
    return list(FLAWS if early_stops(task) else FLAWS[:1])


class ColBenchDemonstrator(Demonstrator):
    """Demonstrates the expert's play of generated tasks, and two flaws.

    - ``answered_at_once``: the agent asks nothing and guesses every particular.
    - ``stopped_asking``: the agent asks only the first questions and guesses the rest.

    Raises:
        ConfigError: the environment's config is wrong, or its tasks are not generated and so have no expert.
    """

    flaws = FLAWS

    def __init__(self, environment: EnvironmentConfig) -> None:
        self.environment = environment
        with raised_as(ConfigError, "environment: "):
            pool = create_pool(environment.name, environment.options, lambda text: [])
        assert isinstance(pool, ColBenchPool)
        self._tasks = pool.all_tasks
        if not all(task.particulars for task in self._tasks.values()):
            raise ConfigError("environment.tasks must be null: only generated tasks have an expert")

    def sources(self) -> list[Path]:
        return [Path(module) for module in (generator.__file__, expert.__file__, __file__)]

    def scripts(
        self, split: str, count: int, seed: int, flawed_share: float = 0.0, habits: Sequence[str] = ()
    ) -> list[Script]:
        rng = random.Random(f"demonstrations {seed}")
        with raised_as(ConfigError, f"no demonstrations of {split}: ", UnknownTask):
            tasks = {task_id: self._tasks[task_id] for task_id in self._tasks.split(split)}
        possible = {task_id: possible_flaws(task) for task_id, task in tasks.items()}
        scripts = []
        for task_id, flaw in draw(possible, count, rng, flawed_share, habits):
            task = tasks[task_id]
            asked = len(task.particulars)
            if flaw is not None:
                asked = 0 if flaw == "answered_at_once" else rng.choice(early_stops(task))
            *questions, answer = expert_play(task) if flaw is None else hasty_play(task, asked)
            scripts.append(Script(task_id, flaw, (*questions, f"{thought(task, asked)}\n{answer}")))
        return scripts

    def renamed(self, demonstration: Demonstration, rng: random.Random) -> Demonstration:
        """Replace the field and the limit that the human named by others. Keep the agent's guesses."""
        answers = " ".join(observation for _, observation in demonstration.steps)
        new: dict[str, str] = {}
        for field in _FIELD.findall(answers):
            other = rng.choice(FIELDS)
            new |= {form.format(field): form.format(other) for form in ("called {}", "field: {}", '"{}"')}
        for limit in _LIMIT.findall(answers):
            new[limit] = str(rng.randrange(10, 100))
        if not new:
            return demonstration
        pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, new))})(?!\w)")
        steps = ((pattern.sub(lambda word: new[word[0]], text) for text in step) for step in demonstration.steps)
        return replace(demonstration, steps=tuple((action, observation) for action, observation in steps))

    def group(self, task_id: str) -> str:
        """Return the name of the task's family."""
        return task_id.split("_")[1].rstrip("0123456789")
