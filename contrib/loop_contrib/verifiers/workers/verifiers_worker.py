"""Plays the episodes of a taskset of the package ``verifiers`` (0.4), one in each process that is forked.

    python verifiers_worker.py SOCKET

Runs under the interpreter that has the package and the taskset, below a node (:mod:`loop_plumbing.fork_server`).
The package runs the harness, the tools and the taskset's scoring; each call to a model goes to the node's recording
endpoint. Facts of the package: without a ``runtime`` an agent is played in a cloud, so a subprocess is asked for where
nothing else is; without a ``harness`` it is given a shell, so the package's plain chat loop takes its place; the name
of a variable holds the key of an endpoint, so the key is in the address instead.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# Behind the packages of this interpreter.
sys.path.append(next(str(folder) for folder in Path(__file__).parents if (folder / "loop_plumbing").is_dir()))

from loop_plumbing import fork_server
from loop_plumbing.breakage import error_line

NO_KEY = "LOOP_THE_KEY_IS_IN_THE_ADDRESS"
AGENT_ERRORS = ("HarnessError", "ProviderError")
"""Errors that the agent's program, or an answer of the endpoint to it, ends with; the taskset is not at fault."""


class Taskset:
    """A split of a taskset.

    Args:
        env: the package's own config of an environment.
        limit: number of tasks used from the start of the split; None uses all.
    """

    def __init__(self, env: Mapping[str, Any], limit: int | None) -> None:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        self._env = load_environment(resolve_env_config(_with_defaults(env)))
        tasks = self._env.taskset if limit is None else self._env.taskset.take(limit)
        if not tasks.bounded:
            raise ValueError(f"taskset {env['taskset']['id']} has no end: set limit to a number of tasks")
        self.tasks = list(tasks)

    def rows(self, taskset: str, split: str) -> list[dict[str, Any]]:
        """Return each task's ``id``, if need be made from ``split``, and ``scale`` or ``unknown`` of :func:`_scale`."""
        ids = _ids(taskset, self.tasks, split)
        return [{"id": task_id, **_scale(task)} for task_id, task in zip(ids, self.tasks, strict=True)]

    def play(self, number: int, base_url: str, max_turns: int) -> dict[str, Any]:
        """Play an episode. Return ``reward``, ``rewards`` and ``metrics``, or ``error`` and whether it ``broke``."""
        for agent in _agents(self._env.config).values():
            agent.max_turns = min(max_turns, agent.max_turns or max_turns)
        return _outcome(asyncio.run(self._episode(self.tasks[number], base_url)))

    async def _episode(self, task: Any, base_url: str) -> Any:
        import verifiers.v1 as vf

        _past_proxies(base_url)
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=NO_KEY)
        async with self._env.serving():
            return await self._env.run_episode(task, vf.ModelContext(model="policy", client=client))


def _with_defaults(env: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with our defaults for what it leaves open about the agent; the package's own would differ.

    Raises:
        ValueError: the config does not have exactly one agent.
    """
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type

    taskset = env["taskset"]["id"]
    fields = env_config_type(taskset, env.get("id", "")).model_fields
    agents = {name: field.default for name, field in fields.items() if isinstance(field.default, AgentConfig)}
    if len(agents) != 1:
        raise ValueError(f"taskset {taskset} is played by {len(agents)} agents; an episode here has one")
    ((name, agent),) = agents.items()
    ours: dict[str, Any] = {}
    if "runtime" not in agent.model_fields_set:
        ours["runtime"] = {"type": "subprocess"}
    if agent.harness is None and default_harness_id(taskset) == "bash":
        ours["harness"] = {"id": "null"}
    return {**env, name: {**ours, **env.get(name, {})}}


def _agents(config: Any) -> dict[str, Any]:
    from verifiers.v1.configs.agent import agent_config_fields

    return agent_config_fields(config)


def _past_proxies(url: str) -> None:
    """Exclude the node's host from the HTTP proxy."""
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), urlsplit(url).hostname]))


def _scale(task: Any) -> dict[str, Any]:
    """Return ``scale``, the lowest and highest weighted sum if each reward is from 0 to 1, or ``unknown``, the reason
    why there is no scale."""
    hooks = task.hooks("reward")
    for hook in hooks:
        if any(word in str(hook.__annotations__.get("return")).lower() for word in ("dict", "mapping")):
            return {"unknown": f"its reward {hook.__name__} may be several at once"}
    weights = [getattr(hook, "_vf_weight", 1.0) for hook in hooks] + [judge.weight for judge in task.config.judges]
    low, high = (sum(filter(wanted, weights)) for wanted in (lambda one: one < 0, lambda one: one > 0))
    if not weights:  # a task without a reward fails when it is graded
        return {"scale": [0.0, 1.0]}
    if not low < high < math.inf or low == -math.inf:
        return {"unknown": f"its rewards have the weights {', '.join(map(str, weights))}"}
    return {"scale": [low, high]}


def _outcome(episode: Any) -> dict[str, Any]:
    """Return the reward of an episode. If its agent played more than once, this is the mean over the plays."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    agents = len({trace.agent.name for trace in episode.traces})
    if not episode.ok or agents != 1:
        what = f"{errors[-1].type}: {errors[-1].message}" if errors else f"{agents} agents played"
        return {"error": what, "broke": not errors or errors[-1].type not in AGENT_ERRORS}
    missing = [name for trace in episode.traces for name, reward in trace.rewards.items() if reward is None]
    if missing or not all(trace.rewards for trace in episode.traces):
        return {"error": f"no reward {missing[0]}" if missing else "there is no reward", "broke": True}
    return {
        "reward": math.fsum(trace.reward for trace in episode.traces) / len(episode.traces),
        "rewards": _means([{name: one.score for name, one in trace.rewards.items()} for trace in episode.traces]),
        "metrics": _means([trace.metrics for trace in episode.traces]),
    }


def _means(plays: list[Mapping[str, float | None]]) -> dict[str, float]:
    """Return the mean of each figure over the plays in which it exists and is finite."""
    by_name: dict[str, list[float]] = {}
    for play in plays:
        for name, value in play.items():
            if value is not None and math.isfinite(value):
                by_name.setdefault(name, []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in by_name.items()}


def _ids(taskset: str, tasks: list[Any], split: str) -> list[str]:
    """Return ids for a split's tasks: their own if all differ, else their names if all differ, else numbered ids."""
    for own in ([task.data.id for task in tasks], [task.data.name for task in tasks]):
        if all(own) and len(set(own)) == len(own):
            return own
    return [f"{taskset}_{split}_{task.data.idx}" for task in tasks]


class Answers:
    """Answers the node's requests: ``tasks`` once, and ``play`` in the process of each episode."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._taskset = settings["taskset"]
        env = {**settings["env"], "taskset": {**settings["env"].get("taskset", {}), "id": self._taskset}}
        try:
            self._splits = {
                split: Taskset({**env, "taskset": {**env["taskset"], **options}}, settings["limit"])
                for split, options in settings["splits"].items()
            }
        except ModuleNotFoundError as error:  # the package says "not found" where a taskset's own import fails, too
            cause = "" if error.__cause__ is None else f"{error.__cause__}: "
            raise ModuleNotFoundError(f"{cause}{error}") from error

    def __call__(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        match request:
            case {"op": "tasks"}:
                splits = self._splits.items()
                return {"result": {split: one.rows(self._taskset, split) for split, one in splits}}
            case {"op": "play", "split": split, "number": number, "base_url": base_url, "max_turns": max_turns}:
                try:
                    return {"result": self._splits[split].play(number, base_url, max_turns)}
                except (Exception, SystemExit) as error:
                    return {"raised": error_line(error)}
        raise ValueError(f"no request: {request}")


if __name__ == "__main__":
    settings = json.loads(sys.stdin.readline())

    def prepare():
        answers = Answers(settings)
        return fork_server.Prepared(fork_server.answers(lambda: answers))

    fork_server.serve(socket.socket(fileno=int(sys.argv[1])), prepare)
