"""A user's module: the tools, reply, rewards and tasks that make it an environment."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from agent_environments.protocol import import_module
from agent_environments.tools import own_folder
from agent_environments.tools.own_folder import neighbours_of, spec_of
from agent_environments.tools.reply import Reply
from agent_environments.tools.reward import Reward
from agent_environments.tools.right_answers import SOLVE, solver_of
from agent_environments.tools.tasks import TaskTable, read_tasks
from agent_environments.tools.tool import Tool
from loop_plumbing.breakage import error_line, raised_as

DECORATORS = ("reply", "reward", "tool")


@dataclass(frozen=True)
class ToolModule:
    """The parts that a user's module gives a tool environment.

    Attributes:
        name: the dataset's name, unless a config gives it another.
        instance_class: the class of the instances on which stateful tools or the reply work; None if there is none.
        reply: answers a turn that calls no tool; None if such a turn is the answer, or a mistake.
        instructions: the beginning of the system message.
        solve: gives the right turns of a task; None if the file has no such function.
    """

    name: str
    tools: dict[str, Tool]
    instance_class: type | None
    reply: Reply | None
    rewards: tuple[Reward, ...]
    tasks: TaskTable
    instructions: str
    solve: Callable[[Any], Any] | None = None

    @property
    def moves(self) -> str:
        """A line that lists an agent's possible actions."""
        ends_by_tool = any(tool.terminal for tool in self.tools.values())
        text = f"answered by {self.reply.name}" if self.reply else "a mistake" if ends_by_tool else "the answer"
        calls = f"calls of {', '.join(self.tools)}; a turn without one is " if self.tools else "its text is "
        return f"{calls}{text}"

    @property
    def grades_groups(self) -> bool:
        """Return whether a reward sees all episodes of a task at once."""
        return any(reward.group for reward in self.rewards)

    @property
    def reading_code_folder(self) -> list[str]:
        """The tools and rewards that take the files of the agent's code."""
        tools = [f"tool {each.name}" for each in self.tools.values() if each.takes_code_folder]
        return [*tools, *(f"reward {each.name}" for each in self.rewards if each.takes_code_folder)]

    def with_tools(self, more: Sequence[Tool]) -> ToolModule:
        """Return a copy with additional tools; raises ValueError if two tools have the same name."""
        return replace(self, tools=_by_name([*self.tools.values(), *more]))


def load_module(name: str, tasks: object = None, alone: bool = False) -> ToolModule:
    """Import a user's module and return its parts: tools, a reply, rewards, ``TASKS`` and ``INSTRUCTIONS``.

    Args:
        name: path of a Python file, or a dotted module path.
        tasks: in place of the module's own ``TASKS``; see :func:`~agent_environments.tools.tasks.read_tasks`.
        alone: whether this process serves no other module; the modules beside the file then stay importable.

    Raises:
        ValueError: the module cannot be imported, or a part is missing, wrong or doubled; the message is one line.
    """
    file = Path(name).resolve() if name.endswith(".py") else None
    with neighbours_of(file, alone) if file is not None and file.is_file() else contextlib.nullcontext():
        module = _import(name, file)
        with raised_as(ValueError, f"{name}: "):
            return _parts(module, tasks)


def _import(name: str, file: Path | None) -> ModuleType:
    try:
        if file is None:
            return import_module(name)
        spec = spec_of(file)
        assert spec.loader is not None, "it is a file"
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where type hints are looked up
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:  # SystemExit comes from an unguarded main(), or from argparse
        raise ValueError(f"module {name} cannot be imported: {error_line(error)}{_cure(error)}") from error


def _cure(error: BaseException) -> str:
    """Return the cure if a decorator was imported from the wrong place; "" for other errors."""
    named = (error.name or "").partition(".")[0] if isinstance(error, ImportError | NameError) else ""
    if named in DECORATORS or (isinstance(error, ImportError) and re.match("loop|torchtune_loop|agent_env", named)):
        return f": the decorators come by `from agent_environments.tools import {', '.join(DECORATORS)}`"
    return ""


def _parts(module: ModuleType, tasks: object) -> ToolModule:
    here = _unwrapped({id(value): value for value in vars(module).values()}.values())
    classes = [value for value in here if isinstance(value, type) and _methods(value)]
    instance_class = _one(classes, "class with tools or a reply")
    rewards = _rewards([value for value in here if isinstance(value, Reward)])
    moves = [value for value in here if isinstance(value, Tool | Reply)]
    if instance_class is not None:
        if not callable(getattr(instance_class, "reset", None)):
            raise ValueError(f"class {instance_class.__name__} has tools or a reply, but no method reset(task)")
        moves += _methods(instance_class)
    elif stateful := [move.name for move in moves if move.stateful]:
        raise ValueError(f"{stateful[0]} takes self, but is not a method of a class")
    table = read_tasks(getattr(module, "TASKS", None) if tasks is None else tasks)
    for task in table.all():
        with raised_as(ValueError, f"task {task['id']} "):
            for reward in rewards:
                reward.check_task(task)
            _check_question(task, optional=instance_class is not None)
    return ToolModule(
        name=module.__name__.removeprefix(f"{own_folder.__name__}."),
        tools=_by_name([move for move in moves if isinstance(move, Tool)]),
        instance_class=instance_class,
        reply=_one([move for move in moves if isinstance(move, Reply)], "reply"),
        rewards=rewards,
        tasks=table,
        instructions=getattr(module, "INSTRUCTIONS", ""),
        solve=solver_of(getattr(module, SOLVE, None)),
    )


def _check_question(task: Mapping[str, Any], optional: bool) -> None:
    if "question" not in task:
        if not optional:
            raise ValueError("has no 'question', the user's message")
    elif not isinstance(task["question"], str):
        raise ValueError(f"has a 'question' that is not a text, the user's message, but {task['question']!r:.80}")


def _methods(owner: type) -> list[Tool | Reply]:
    """Return the tools and the reply that a class defines, inherited ones first."""
    attributes: dict[str, Any] = {}
    for base in reversed(owner.__mro__):
        attributes |= vars(base)
    return [value for value in _unwrapped(attributes.values()) if isinstance(value, Tool | Reply)]


def _unwrapped(values: Iterable[Any]) -> list[Any]:
    """Return the values, with static methods as functions; raises ValueError if another decorator hides a tool."""
    ours: tuple[type[Any], ...] = (Tool, Reply, Reward)
    unwrapped = [value.__func__ if isinstance(value, staticmethod) else value for value in values]
    for value in unwrapped:
        inner = value.__func__ if isinstance(value, classmethod) else inspect.getattr_static(value, "__wrapped__", None)
        if isinstance(inner, ours) and inner not in unwrapped:
            cure = "make it @staticmethod" if isinstance(value, classmethod) else "put ours above it"
            raise ValueError(f"{inner.__name__} is hidden by the decorator {type(value).__name__} above ours: {cure}")
    return unwrapped


def _rewards(rewards: list[Reward]) -> tuple[Reward, ...]:
    if not any(reward.weight for reward in rewards):
        raise ValueError("there is no reward: write a function with @reward" + (", of some weight" if rewards else ""))
    names = [reward.name for reward in rewards]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"there are two rewards {twice!r}: give one another name")
    return tuple(rewards)


def _one(items: list[Any], what: str) -> Any:
    if len(items) > 1:
        raise ValueError(f"there is more than one {what}: {', '.join(item.__name__ for item in items)}")
    return items[0] if items else None


def _by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    by_name: dict[str, Tool] = {}
    for each in tools:
        if each.name in by_name:
            raise ValueError(f"there are two tools {each.name!r}")
        if not each.description:
            raise ValueError(f"tool {each.name} has no docstring: the policy reads it")
        assert each.schema, "a signature that no schema can say is an error now, not in an episode"
        by_name[each.name] = each
    return by_name
