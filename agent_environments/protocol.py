"""The environment protocol: the interface of any world an agent acts in, as the rollout node calls it.

An :class:`EnvironmentPool` is opened once per rollout node and lends one :class:`Environment` per episode. Everything
is text; tokens and models stay on the other side of this file. The one thing a pool learns of the policy is how many
tokens a text has, through :class:`TokenSpans`, because observations are cut by tokens.

No voiding
    Whatever the agent's code, its output, its answer or the state it leaves causes ends in a *grade*: an agent that
    could have its failures struck out and tried again would be paid for it. So an environment raises
    :class:`EnvironmentCrashed` only for faults that the agent's code did not cause; that attempt is repeated with the
    same random seeds. A step that broke, or took too long, ends the episode, and its effects stay. A state that cannot
    be graded has an ``ungradable`` :class:`Grade` of reward 0, as little as doing nothing earns.
    That includes a grade that holds invalid values, or contradicts itself
    (:mod:`agent_environments.plain_values`). Where the environment itself broke, the grade says so (``broke``).
    Nor is an agent charged with the machine's faults: :mod:`agent_environments.lost_worlds` tells the two apart.
    :mod:`agent_environments.guarded_environment` holds any environment to this from outside, and
    :mod:`agent_environments.conformance` tests it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
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
    """A fault in an environment itself, whatever caused it; an agent's own code that failed does not count.

    ``where`` is "step", "grade", "reward NAME", or "node" for a fault of the node itself after a turn; ``what`` is
    the last line of the exception, with the user's own file and line.
    """

    where: str
    what: str

    @property
    def line(self) -> str:
        """Both in one line."""
        return self.what if self.what.startswith(f"{self.where} ") else f"{self.where} raised {self.what}"


@dataclass(frozen=True)
class ToolUse:
    """The use of one tool: how often it was called with arguments that it takes, how many of these calls raised, and
    what (one of them).

    A tool that raises breaks nothing: the agent reads the error and goes on. A tool that always raises is useless.
    """

    tool: str
    calls: int
    raised: int
    what: str = ""


@dataclass(frozen=True)
class StepResult:
    """The world's answer to one action.

    ``observation`` is the whole content of the next user message: output, truncation note and reminder included.
    ``done`` is true when the agent has ended its episode; the policy is then not asked again. ``failed`` says that the
    executed code raised, ``empty_action`` that the action held no code at all. The observation ends with ``reminder``,
    which stays there when the text is cut. ``broke`` says that the environment itself failed over the action, ``tools``
    which tools it called. ``reward`` is the action's own reward, where the environment has such: any finite
    number, beside the grade, which it is not a part of.
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
    """A test of a task's evaluation. ``no_op_pass`` marks those that doing nothing already passes."""

    text: str
    passed: bool
    no_op_pass: bool = False


@dataclass(frozen=True)
class Grade:
    """The grader's verdict: ``reward`` in [0, 1] is the fraction of requirements passed, ``success``: all passed.

    ``tampered`` names changes that the grader found behind the world's own interfaces; ``ungradable`` says why the
    state could not be graded. The reward is then zero, and ``success`` false. ``broke`` is the first thing that
    broke in the episode's environment, ``tools`` what its tools were asked; the node adds both, from the answers to the
    actions. ``rewards`` are the parts of the reward, by name, and ``metrics`` other figures by name; both are
    recorded and change nothing.
    """

    reward: float
    success: bool
    requirements: tuple[Requirement, ...] = ()
    tampered: str | None = None
    ungradable: str | None = None
    broke: Broke | None = None
    tools: tuple[ToolUse, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of_ungradable(cls, why: str, broke: Broke | None = None) -> Grade:
        """Return the grade of a state that cannot be graded: no more than doing nothing is worth in any environment."""
        return cls(reward=0.0, success=False, ungradable=why, broke=broke)


class EnvironmentFault(Exception):
    """The base of an environment's errors; ``reason`` is a stable word that ends up in failure records."""

    reason = "environment_error"


class UnknownTask(EnvironmentFault, ValueError):
    """A task id that the pool's dataset does not hold."""

    reason = "unknown_task"


class EnvironmentCrashed(EnvironmentFault):
    """World, grader or server died, the agent's code had no part in it, and the episode could not be brought back.

    The attempt is repeated, with the same random seeds.
    """

    reason = "environment_crashed"


class EnvironmentTimeout(EnvironmentFault):
    """A deadline of a step or an episode passed. Out of ``step``: the episode is over, and its state is graded."""

    reason = "environment_timeout"


@runtime_checkable
class Environment(Protocol):
    """An episode in one world. Calls come one at a time: start, step ..., grade, close."""

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
            EnvironmentCrashed: there is no grader. A state that no grader can grade is an ``ungradable`` grade.
        """

    async def close(self) -> None:
        """Release the world and everything it wrote. May be called at any time, and twice."""


@dataclass(frozen=True)
class PoolStatus:
    """Counters for the node's metrics page; ``losses`` by kind (:mod:`agent_environments.lost_worlds`)."""

    open_worlds: int = 0
    waiting: int = 0
    restarts: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)
    losses: Mapping[str, int] = field(default_factory=dict)


@runtime_checkable
class EnvironmentPool(Protocol):
    """The environments of one node. ``dataset`` is the name printed beside every score.

    A class may also say how its tasks are grouped and what its scores are called
    (:mod:`agent_environments.description`).
    """

    dataset: str

    async def open(self) -> None:
        """Start the servers that environments need; raises one clear error when something is missing."""

    def tasks(self, split: str) -> list[str]:
        """Return the task ids of a split, in the dataset's order; raises UnknownTask, which names the known splits."""

    def check_tasks(self, task_ids: Sequence[str]) -> None:
        """Raise UnknownTask for the first id that is not in the dataset."""

    async def acquire(self, episode_id: str) -> Environment:
        """Return an environment for one episode; waits (first come, first served) while all slots are taken."""

    def status(self) -> PoolStatus:
        """Return counters for the node's metrics page."""

    async def close(self) -> None:
        """End every world and child process."""


@runtime_checkable
class PoolByTask(Protocol):
    """The further interface of a pool whose slots depend on the task, as in a mixture of several environments."""

    async def acquire_for(self, episode_id: str, task_id: str) -> Environment:
        """:meth:`EnvironmentPool.acquire`, but waits for the slots of this task; raises UnknownTask."""


@runtime_checkable
class PoolWithPreflight(Protocol):
    """The further interface of a pool that knows its tasks before it is opened."""

    def preflight(self, split: str | Sequence[str]) -> list[str] | None:
        """Return the tasks of a split, or the given ones, if this machine has what the pool needs; None where it has,
        but only an open pool knows the tasks.

        Raises:
            ValueError, FileNotFoundError: something is missing; names it and the cure. UnknownTask: no such task.
        """


@runtime_checkable
class PoolWithLeastContext(Protocol):
    """The further interface of a pool whose episodes begin with prompts of its own."""

    @property
    def least_context(self) -> int:
        """Tokens of context that an episode needs at least; 0 where that is not known."""


@runtime_checkable
class PoolWithSplits(Protocol):
    """The further interface of a pool that knows the names of its splits before it is opened."""

    def splits(self) -> list[str]:
        """Return the names of the splits in the order in which they are listed."""


def tasks_of_split(splits: Mapping[str, Collection[str]], split: str) -> list[str]:
    """Return the task ids of one of ``splits``; raises UnknownTask where there is no such split, or it is empty."""
    if split not in splits:
        raise UnknownTask(f"no split {split!r}; there are {', '.join(splits)}")
    if not splits[split]:
        raise UnknownTask(f"split {split!r} is empty: give it tasks, or leave it out")
    return list(splits[split])


async def acquire(pool: EnvironmentPool, episode_id: str, task_id: str) -> Environment:
    """Return an environment for an episode of this task. From then on the episode waits for no other, so a deadline
    that begins then is all the episode's own.
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
    """Return whether this names an environment whose agent is a program (its class has ``is_harness = True``). Only a
    node plays one: other callers would play its world without its program."""
    if name in ENVIRONMENTS or name not in plug_ins("environments"):
        return ENVIRONMENTS.get(name, name) == ENVIRONMENTS["harness"]
    try:
        return getattr(pool_class(name), "is_harness", False)
    except ValueError:  # creating the pool reports it
        return False


def create_pool(name: str, options: Mapping[str, Any], token_spans: TokenSpans) -> EnvironmentPool:
    """Build (not yet open) the pool named in a config: ``class(token_spans=..., **options)``.

    Raises:
        ValueError: unknown name, or options that the pool's class does not take.
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
        ValueError: an unknown name, or nothing that can be imported.
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
    """Import a module that a config names; Python searches the working folder last, for modules that are nowhere else.

    So a file there with the name of a module of Python's, such as ``email.py``, does not take that module's place.
    """
    if importlib.util.find_spec(name.partition(".")[0]) is None and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return importlib.import_module(name)
