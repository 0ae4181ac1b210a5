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
    "deeds-v1": ["good", "raises", "unscored", "unrewarded", "dies", "exits", "harness-error", "outside", "two-agents"],
    "numbers-v1": [None, None, None],
    "endless-v1": None,
    "duo-v1": ["good"],
}


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
        raise ModuleNotFoundError(f"taskset {taskset!r} not found")
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
        self.bounded = names is not None
        prefix = config.get("prefix", "")
        self._names = ["good"] * 1000 if names is None else [name and prefix + name for name in names]

    def take(self, count):
        self._names, self.bounded = self._names[:count], True
        return self

    def __iter__(self):
        for number, name in enumerate(self._names):
            yield SimpleNamespace(data=SimpleNamespace(id=name, name=None, idx=number))


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
                episode.traces.append(trace)
            case "dies":
                os._exit(3)
            case "exits":
                raise SystemExit("it has had enough")
        return episode
