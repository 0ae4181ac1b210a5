"""The part of the package `verifiers` 0.4 that our worker uses, for tests; a task does what its name says.

Its modules are this one. An agent asks for as many turns as its task wants; the harness ends at the first refusal.
"""

import contextlib
import json
import os
import sys
import urllib.error
import urllib.request
from types import SimpleNamespace

for _name in ("v1", "v1.utils", "v1.utils.loaders", "v1.configs", "v1.configs.agent"):
    sys.modules[f"verifiers.{_name}"] = sys.modules[__name__]

TASKSETS = {
    "deeds-v1": [
        "good",
        "raises",
        "unscored",
        "unrewarded",
        "dies",
        "exits",
        "harness-error",
        "outside",
        "two-agents",
        "twice",
    ],
    "numbers-v1": [None, None, None],
    "endless-v1": None,
    "duo-v1": ["good"],
    **{
        f"{weights}-v1": ["good", "best", "worst"]
        for weights in ("heavy", "penalty", "judged", "several", "endless weight", "weightless")
    },
}
WEIGHTS = {
    "heavy": [1.0, 0.5],
    "penalty": [2.0, -0.5],
    "judged": [0.5],
    "endless weight": [float("inf"), 1.0],
    "weightless": [0.0, 0.0],
}
"""Of the rewards of a task's taskset; of all others two halves."""


class AgentConfig:
    def __init__(self, **given):
        self.model_fields_set = set(given)
        self.harness = given.get("harness")
        self.runtime = given.get("runtime", {"type": "cloud"})
        self.max_turns = given.get("max_turns")


def agent_config_fields(config):
    return {name: value for name, value in vars(config).items() if isinstance(value, AgentConfig)}


def env_config_type(taskset, env_id=""):
    if taskset not in TASKSETS:
        cause = ModuleNotFoundError(f"No module named {'nltk' if taskset == 'needy-v1' else taskset!r}")
        raise ModuleNotFoundError(f"taskset {taskset!r} not found") from cause
    agents = {"solver": AgentConfig(), "judge": AgentConfig()} if taskset == "duo-v1" else {"agent": AgentConfig()}
    fields = {name: SimpleNamespace(default=agent) for name, agent in agents.items()}
    return SimpleNamespace(model_fields={"retries": SimpleNamespace(default=None), **fields})


def default_harness_id(taskset):
    return "bash"


def resolve_env_config(data):
    return SimpleNamespace(taskset=data["taskset"], agent=AgentConfig(**data["agent"]))


def load_environment(config):
    return Env(config)


class Taskset:
    def __init__(self, config):
        names = TASKSETS[config["id"]]
        self._id = config["id"].removesuffix("-v1")
        self.bounded = names is not None
        prefix = config.get("prefix", "")
        self._names = ["good"] * 1000 if names is None else [name and prefix + name for name in names]

    def take(self, count):
        self._names, self.bounded = self._names[:count], True
        return self

    def __iter__(self):
        for number, name in enumerate(self._names):
            yield Task(self._id, SimpleNamespace(id=name, name=None, idx=number))


class Task:
    def __init__(self, taskset, data):
        self.taskset, self.data = taskset, data
        judges = [SimpleNamespace(weight=1.5)] if taskset == "judged" else []
        self.config = SimpleNamespace(judges=judges)

    def hooks(self, kind):
        assert kind == "reward"
        if self.taskset == "several":
            return [_reward(None, "float | dict[str, float]")]
        return [_reward(weight, "float") for weight in WEIGHTS.get(self.taskset, [0.5, 0.5])]


def _reward(weight, returns):
    def reward(self): ...

    reward.__annotations__["return"] = returns
    if weight is not None:
        reward._vf_weight = weight
    return reward


def EvalClientConfig(**given):
    return SimpleNamespace(**given)


ModelContext = EvalClientConfig


def ask(base_url, messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    sent = urllib.request.Request(f"{base_url}/chat/completions", body, {"Authorization": "Bearer EMPTY"})
    with urllib.request.urlopen(sent) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


class Env:
    def __init__(self, config):
        self.config = config
        self.taskset = Taskset(config.taskset)

    @contextlib.asynccontextmanager
    async def serving(self):
        yield

    async def run_episode(self, task, context):
        agent, deed = self.config.agent, (task.data.id or "good").removeprefix("dev-")
        assert (agent.runtime, agent.harness["id"]) == ({"type": "subprocess"}, "null")
        said = []
        for _ in range(min(agent.max_turns, 2)):
            said.append(ask(context.client.base_url, [{"role": "user", "content": f"{task.data.id} {len(said)}"}]))
        reward = SimpleNamespace(score=len(said) / 2, weight=0.5)
        trace = SimpleNamespace(
            agent=SimpleNamespace(name="agent"),
            rewards={"turns": reward, "form": SimpleNamespace(score=1.0, weight=0.5)},
            reward=reward.score * 0.5 + 0.5,
            metrics={"characters": float(len(said[0])), "unknown": None, "nothing": float("nan")},
            errors=[],
        )
        episode = SimpleNamespace(errors=[], traces=[trace], ok=True)
        match deed:
            case "raises":
                trace.errors.append(SimpleNamespace(type="TaskError", message="scoring: KeyError: 'answer'"))
                episode.ok = False
            case "harness-error":
                trace.errors.append(SimpleNamespace(type="HarnessError", message="it exited 1"))
                episode.ok = False
            case "unscored":
                trace.rewards["form"] = None
            case "unrewarded":
                trace.rewards = {}
            case "outside":
                trace.reward = 1.5
            case "two-agents":
                episode.traces.append(SimpleNamespace(**vars(trace) | {"agent": SimpleNamespace(name="judge")}))
            case "twice":
                again = {"rewards": {"turns": SimpleNamespace(score=0.0, weight=0.5)}, "reward": 0.0}
                episode.traces.append(SimpleNamespace(**vars(trace) | again))
            case "best" | "worst":
                trace.reward = {"heavy": 1.5, "penalty": 2.0, "judged": 2.0}[task.taskset] * (deed == "best")
            case "dies":
                os._exit(3)
            case "exits":
                raise SystemExit("it has had enough")
        return episode
