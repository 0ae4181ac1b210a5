"""Asks the class of a pool for facts that it knows without opening one. Every method that it calls may be missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_environments.protocol import Message, TokenSpans, pool_class


def packages_of(name: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Return versions of the packages that an environment uses elsewhere, from its class's ``packages(config)``."""
    packages = getattr(pool_class(name), "packages", None)
    return {} if packages is None else dict(packages(config))


def difficulties_of(name: str, root: Path, task_ids: Sequence[str]) -> dict[str, int]:
    """Return the difficulty of each task of the dataset in ``root``: the class's ``difficulties(root, task_ids)``.

    {} where the environment or the dataset has no difficulties.
    """
    difficulties = getattr(pool_class(name), "difficulties", None) if name else None
    return {} if difficulties is None else dict(difficulties(root, task_ids))


@dataclass(frozen=True)
class Solution:
    """The reference solution of a task as an agent's episode: ``steps`` holds (action, observation) pairs."""

    task_id: str
    opening: Sequence[Message]
    steps: Sequence[tuple[str, str]]


def solutions_of(name: str, root: Path, split: str, prompt: str, token_spans: TokenSpans) -> tuple[str, list[Solution]]:
    """Return the name of the dataset in ``root`` and the reference solutions of a split. Calls ``solutions(root, split,
    prompt, token_spans)`` of the pool's class.

    Args:
        prompt: the name of the prompt that policies get.

    Raises:
        ValueError: the environment has no solutions. Errors of the class pass through.
    """
    solutions = getattr(pool_class(name), "solutions", None)
    if solutions is None:
        raise ValueError(f"environment {name!r} has no reference solutions")
    dataset, episodes = solutions(root, split, prompt, token_spans)
    return dataset, list(episodes)


def keeps_states(name: str) -> bool:
    """Return whether an environment can keep the final states of its episodes."""
    return hasattr(pool_class(name), "keeping_states")


def keeping_states(name: str, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the options that make an environment keep final states in ``folder``: ``keeping_states(config, folder)``
    of the pool's class, for which :func:`keeps_states` must be true."""
    keep: Any = pool_class(name)
    return dict(keep.keeping_states(config, folder))


class MissingState(RuntimeError):
    """The final state of an episode is not in the folder where the node should keep it."""


@dataclass(frozen=True)
class FinalState:
    """The end of a task's episode in one run of an evaluation. ``episode`` is the rollout's id if the reached state
    counts; None if the state does not count, because the episode ran over budget or was lost."""

    task_id: str
    run: int
    episode: str | None


@dataclass(frozen=True)
class FinishedRuns:
    """The final states of one policy under one way of sampling, on the tasks that ``split`` names."""

    policy: str
    sampling: str
    split: str
    states: Sequence[FinalState]


def write_states(name: str, config: Mapping[str, Any], runs: FinishedRuns, states: Path, folder: Path) -> list[str]:
    """Write final states in the environment's own layout below ``folder``: call ``write_states(config, runs, states,
    folder)`` of the pool's class. Return lines to print, such as commands that read the files.

    Args:
        states: the folder that was passed to :func:`keeping_states`.

    Raises:
        MissingState: a state was not kept.
    """
    write: Any = pool_class(name)
    return list(write.write_states(config, runs, states, folder))
