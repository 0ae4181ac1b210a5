"""The environment protocol: the interface of any world an agent acts in, as the rollout node calls it.

An :class:`EnvironmentPool` is opened once per rollout node and lends one :class:`Environment` per episode. Everything
is text; tokens and models stay on the other side of this file. The one thing a pool learns of the policy is how many
tokens a text has, through :class:`TokenSpans`, because observations are cut by tokens.

No voiding
    Everything that the agent causes, by its code, output, answer or final state, ends in a *grade*. An agent that could
    have its failures struck out and tried again would be rewarded for them. So an environment raises
    :class:`EnvironmentCrashed` only for faults that the agent's code did not cause; that attempt is repeated with the
    same random seeds. A step that broke, or took too long, ends the episode, and its effects stay. A state that cannot
    be graded has an ``ungradable`` :class:`Grade` of reward 0, as little as doing nothing earns. That includes a grade
    that holds invalid values, or contradicts itself (:mod:`agent_environments.plain_values`). If the environment itself
    broke, the grade says so (``broke``). Nor is an agent charged with the machine's faults:
    :mod:`agent_environments.lost_worlds` tells the two apart. :mod:`agent_environments.guarded_environment` holds any
    environment to this from outside, and :mod:`agent_environments.conformance` tests it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, runtime_checkable

from loop_plumbing.breakage import error_line
from loop_plumbing.names import explain_type_error, mistyped_option, nearest
from loop_plumbing.plug_ins import plug_ins

Role = Literal["system", "user", "assistant"]

TokenSpans = Callable[[str], Sequence[tuple[int, int]]]
"""Maps a text to the (start, end) character offsets of its tokens, in order, under the policy's own tokenizer."""


@dataclass(frozen=True)
class Message:
    """A chat message as the policy sees it."""

    role: Role
    content: str


@dataclass(frozen=True)
class Broke:
    """A fault in an environment itself, whatever its cause. A failure of the agent's own code is not such a fault.

    ``where`` is "step", "grade", "reward NAME", or "node" for a fault of the node itself after a turn; ``what`` is
    the last line of the exception, with the user's own file and line.
    """

    where: str
    what: str

    @property
    def line(self) -> str:
        """``where`` and ``what`` in one line."""
        return self.what if self.what.startswith(f"{self.where} ") else f"{self.where} raised {self.what}"


@dataclass(frozen=True)
class ToolUse:
    """The use of one tool: the number of calls with valid arguments, how many of these calls raised, and one of the
    errors.

    A tool that raises breaks nothing: the agent reads the error and goes on. A tool that always raises is useless.
    """

    tool: str
    calls: int
    raised: int
    what: str = ""


@dataclass(frozen=True)
class StepResult:
    """The environment's answer to one action.

    ``observation`` is the whole content of the next user message: output, truncation note and reminder included.
    ``done`` is true if the agent has ended its episode; the policy is then not asked again. ``failed`` says that the
    executed code raised, ``empty_action`` that the action held no code. The observation ends with ``reminder``, which
    stays when the text is cut. ``broke`` is the environment's own fault during the action, if any. ``tools`` lists the
    tools that the action called. ``reward`` is the action's own reward, any finite number, if the environment gives
    such rewards; it is not part of the grade.
    """

    observation: str
    done: bool
    failed: bool = False
    empty_action: bool = False
    reminder: str = ""
    broke: Broke | None = None
    tools: tuple[ToolUse, ...] = ()
    reward: float | None = None


@dataclass(frozen=True)
class Requirement:
    """A test in a task's evaluation. ``no_op_pass`` says that an agent that does nothing passes the test."""

    text: str
    passed: bool
    no_op_pass: bool = False


@dataclass(frozen=True)
class Grade:
    """The grader's verdict: ``reward`` in [0, 1] is the fraction of requirements passed; ``success`` means all passed.

    ``ungradable`` says why the state could not be graded; the reward is then 0 and ``success`` false. ``broke`` is the
    first fault in the episode's environment, and ``tools`` the use of its tools; the node takes both from the answers
    to the actions. ``rewards`` holds the parts of the reward by name, ``metrics`` other figures by name; both are only
    recorded.
    """

    reward: float
    success: bool
    requirements: tuple[Requirement, ...] = ()
    ungradable: str | None = None
    broke: Broke | None = None
    tools: tuple[ToolUse, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of_ungradable(cls, why: str, broke: Broke | None = None) -> Grade:
        """Return the grade of a state that cannot be graded: it is worth no more than doing nothing."""
        return cls(reward=0.0, success=False, ungradable=why, broke=broke)


class EnvironmentFault(Exception):
    """Base class of an environment's errors; failure records store the stable word ``reason``."""

    reason = "environment_error"


class UnknownTask(EnvironmentFault, ValueError):
    """The pool's dataset holds no task of this id, or no such split."""

    reason = "unknown_task"


class EnvironmentCrashed(EnvironmentFault):
    """The world, grader or server died, not because of the agent's code, and the episode could not be brought back.

    The attempt is repeated, with the same random seeds.
    """

    reason = "environment_crashed"


class EnvironmentTimeout(EnvironmentFault):
    """A deadline of a step or an episode passed. If ``step`` raises it, the episode is over and its state is graded."""

    reason = "environment_timeout"


@runtime_checkable
class Environment(Protocol):
    """An episode in one world. The node makes one call at a time: start, step (repeatedly), grade, close."""

    async def start(self, task_id: str) -> list[Message]:
        """Bring up the world of ``task_id`` and return the messages that open the episode."""

    async def step(self, action: str) -> StepResult:
        """Run the action in an assistant message and return its result.

        Raises:
            EnvironmentTimeout: the action took too long; the episode is graded.
            EnvironmentCrashed: the world is lost by no fault of the agent; the attempt is repeated.
        """

    async def grade(self) -> Grade:
        """Grade the state reached so far; never calls into the process that ran the agent's code.

        Raises:
            EnvironmentCrashed: there is no grader. (For a state that no grader can grade, return ``ungradable``.)
        """

    async def close(self) -> None:
        """Release the world and everything it wrote. May be called at any time, and twice."""


@dataclass(frozen=True)
class PoolStatus:
    """Counters for the node's metrics page: environments that are lent, callers that wait for one, and processes that
    were started again. ``losses`` counts lost worlds by kind (:mod:`agent_environments.lost_worlds`)."""

    open_worlds: int = 0
    waiting: int = 0
    restarts: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)
    losses: Mapping[str, int] = field(default_factory=dict)


@runtime_checkable
class EnvironmentPool(Protocol):
    """Lend the environments of one node. ``dataset`` is the name printed beside every score.

    A class may also say how its tasks are grouped and what its scores are called, in its attribute ``description``
    (:mod:`agent_environments.description`). Its other optional abilities are the protocols below.
    """

    dataset: str

    async def open(self) -> None:
        """Start the servers that environments need; if something is missing, raise one clear error."""

    def tasks(self, split: str) -> list[str]:
        """Return a split's task ids in the dataset's order. For an unknown split, UnknownTask names the known ones."""

    def check_tasks(self, task_ids: Sequence[str]) -> None:
        """Raise UnknownTask for the first id that is not in the dataset."""

    async def acquire(self, episode_id: str) -> Environment:
        """Return an environment for one episode; while all slots are taken, callers wait, first come, first served."""

    def status(self) -> PoolStatus:
        """Return counters for the node's metrics page."""

    async def close(self) -> None:
        """End every world and child process."""


# The optional side: each protocol from here on is an ability that a pool may have, and most pools lack.


@runtime_checkable
class PoolByTask(Protocol):
    """Ability of a pool whose slots depend on the task, as in a mixture of several environments."""

    async def acquire_for(self, episode_id: str, task_id: str) -> Environment:
        """Acquire as :meth:`EnvironmentPool.acquire` does, but wait for a slot of this task; raises UnknownTask."""


@runtime_checkable
class PoolWithPreflight(Protocol):
    """Ability of a pool that knows its tasks before it is opened."""

    def preflight(self, split: str | Sequence[str]) -> list[str] | None:
        """Check that this machine has what the pool needs. Return the tasks of the split, or the given tasks; None if
        only an open pool knows the tasks.

        Raises:
            ValueError, FileNotFoundError: the message names what is missing and the cure. UnknownTask: no such task.
        """


@runtime_checkable
class PoolWithLeastContext(Protocol):
    """Ability of a pool whose episodes begin with prompts of its own."""

    @property
    def least_context(self) -> int:
        """The least number of context tokens that an episode needs; 0 if unknown."""


@runtime_checkable
class PoolWithSplits(Protocol):
    """Ability of a pool that knows the names of its splits before it is opened."""

    def splits(self) -> list[str]:
        """Return the names of the splits in the order in which they are listed."""


@runtime_checkable
class PoolWithExpert(Protocol):
    """Ability of a pool that knows how its tasks are solved; `loop try` plays the solutions."""

    async def expert(self, task_id: str) -> list[str]:
        """Return commands that solve the task; raises EnvironmentFault if there are none."""

    def message(self, command: str) -> str:
        """Return the assistant message that gives this command and nothing else."""


@runtime_checkable
class ProgramPool(Protocol):
    """Ability of a pool whose agents are programs: its environments are
    :class:`~agent_environments.program_protocol.ProgramEnvironment`, which only a node can play.
    """

    @property
    def runs_elsewhere(self) -> bool:
        """Return whether other machines start the programs and take an episode for each program."""

    async def take(self, task_id: str | None, timeout_s: float) -> Any:
        """Return the oldest offered episode (:class:`~agent_environments.program_protocol.Offer`), of ``task_id`` or of
        any task (None); None if none is offered in time."""


@dataclass(frozen=True)
class Member:
    """An episode of a group. ``group_input`` holds the JSON data from which the episode's pool grades the group.

    Without ``group_input`` the episode is not graded in the group: its ``grade`` is final, as for a state that cannot
    be graded. Otherwise ``grade`` holds only a fault in the episode, the use of tools, and the program's figures.
    """

    grade: Grade
    group_input: Mapping[str, Any] | None = None


@runtime_checkable
class GroupedEnvironment(Environment, Protocol):
    """Ability of an environment whose episodes may be graded with others of the same task."""

    async def grade_member(self) -> Member:
        """Grade as :meth:`Environment.grade` does, for a pool that grades groups."""


@runtime_checkable
class PoolOfGroups(Protocol):
    """Ability of a pool that may grade all rollouts of a task at once (:mod:`agent_environments.groups`)."""

    def grades_groups(self, task_id: str) -> bool:
        """Return whether the pool grades all rollouts of this task at once."""

    async def grade_group(self, task_id: str, inputs: Sequence[Mapping[str, Any]]) -> list[Grade]:
        """Return the grade of each member of a group, in the order of the members.

        Raises:
            EnvironmentCrashed: no process can grade; the call may be repeated.
        """


# The abilities below are class methods: their callers build no pool. ``config`` holds the environment's options.


@runtime_checkable
class PoolWithPackages(Protocol):
    """Ability of a pool's class whose environments use packages of another interpreter."""

    @classmethod
    def packages(cls, config: Mapping[str, Any]) -> dict[str, str]:
        """Return the versions of these packages by name; scores depend on them."""


@runtime_checkable
class PoolWithDifficulties(Protocol):
    """Ability of a pool's class whose dataset rates its tasks."""

    @classmethod
    def difficulties(cls, config: Mapping[str, Any], task_ids: Sequence[str]) -> dict[str, int]:
        """Return the difficulty of each task; {} if a task has none, or if this machine lacks the dataset."""


@dataclass(frozen=True)
class FinishedRuns:
    """The final states of one policy under one way of sampling, on the tasks that ``split`` names.

    ``states`` maps (task id, run) to the id of the rollout that reached the state. None: the state does not count,
    because the episode ran over budget or was lost.
    """

    policy: str
    sampling: str
    split: str
    states: Mapping[tuple[str, int], str | None]


@runtime_checkable
class PoolWithFinalStates(Protocol):
    """Ability of a pool's class that can keep the final states of episodes."""

    @classmethod
    def keeping_states(cls, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Return ``config`` with the options that make episodes leave their final states in ``folder``."""

    @classmethod
    def write_states(cls, config: Mapping[str, Any], runs: FinishedRuns, states: Path, folder: Path) -> list[str]:
        """Write states that were kept in ``states`` below ``folder``, in the environment's own layout. Return lines to
        print, such as commands that read the files.

        Raises:
            EnvironmentFault: a state was not kept.
        """


def tasks_of_split(splits: Mapping[str, Collection[str]], split: str) -> list[str]:
    """Return the task ids of one of ``splits``; raises UnknownTask if the split does not exist or is empty."""
    if split not in splits:
        raise UnknownTask(f"no split {split!r}; there are {', '.join(splits)}")
    if not splits[split]:
        raise UnknownTask(f"split {split!r} is empty: give it tasks, or leave it out")
    return list(splits[split])


async def acquire(pool: EnvironmentPool, episode_id: str, task_id: str) -> Environment:
    """Return an environment for an episode of this task. The episode then waits for no other episode, so a deadline
    that begins on return counts only the episode's own time.
    """
    if isinstance(pool, PoolByTask):
        return await pool.acquire_for(episode_id, task_id)
    return await pool.acquire(episode_id)


ENVIRONMENTS: dict[str, str] = {
    "appworld": "appworld_adapter.pool.forked:AppWorldPool",
    "counter": "agent_environments.counter:CounterPool",
    "harness": "agent_environments.harness.pool:HarnessPool",
    "mixed": "agent_environments.mixed:MixedPool",
    "tools": "agent_environments.tools.environment:ToolPool",
}
"""Short names of the core's environments: name -> "module:class". Installed packages add theirs by entry points of the
group ``torchtune_loop.environments``."""


def is_harness(name: str) -> bool:
    """Return whether this names an environment whose agent is a program (:class:`ProgramPool`)."""
    try:
        return isinstance(pool_class(name), ProgramPool)
    except ValueError:  # creating the pool reports it
        return False


def create_pool(name: str, options: Mapping[str, Any], token_spans: TokenSpans) -> EnvironmentPool:
    """Build the pool named in a config with ``class(token_spans=..., **options)``; the pool is not open yet.

    Raises:
        ValueError: the name is unknown, or the pool's class does not take these options.
    """
    build = pool_class(name)
    if wrong := mistyped_option(build, options):
        raise ValueError(f"environment {name!r}: {wrong}")
    try:
        return build(token_spans=token_spans, **options)
    except TypeError as error:
        wrong = explain_type_error(error, build, "token_spans", options)
        raise ValueError(f"environment {name!r} {wrong}") from error


def pool_class(name: str) -> Callable[..., EnvironmentPool]:
    """Return the function or class that builds the pool of this name.

    Raises:
        ValueError: the name is unknown, or cannot be imported.
    """
    target = ENVIRONMENTS.get(name) or plug_ins("environments").get(name, name if ":" in name else None)
    if target is None:
        known = sorted({*ENVIRONMENTS, *plug_ins("environments")})
        cure = nearest(name, known, f"registered: {', '.join(known)}, or give 'module:Class'")
        raise ValueError(f"unknown environment {name!r}; {cure}")
    module, _, attribute = target.partition(":")
    try:
        loaded = import_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"environment {name!r} cannot be imported: {error_line(error)}") from error
    if not hasattr(loaded, attribute):
        raise ValueError(f"environment {name!r} cannot be imported: {module} has no {attribute!r}")
    return getattr(loaded, attribute)


def import_module(name: str) -> ModuleType:
    """Import a module that a config names. Python searches the working folder last, for modules that are nowhere else.

    So a file in the working folder, such as ``email.py``, does not replace Python's module of the same name.
    """
    if importlib.util.find_spec(name.partition(".")[0]) is None and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return importlib.import_module(name)
