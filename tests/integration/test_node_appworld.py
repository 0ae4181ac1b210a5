"""The rollout node over the real AppWorld engine, with a scripted policy: real worlds, real grades, real deaths."""

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from agent_environments.process_guard import descendants
from rollout_server.collection_request import Limits
from support.counter_node import counter_request, local_node
from support.waiting import DEADLINE_S, wait_until

CHECKOUT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("APPWORLD_PYTHON", CHECKOUT / ".venv-appworld" / "bin" / "python"))
ROOT = CHECKOUT / "worlds" / "synthetic"

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not PYTHON.exists(), reason="no AppWorld environment: run `make setup`"),
    pytest.mark.skipif(not (ROOT / "data").exists(), reason="no synthetic world: run `make world`"),
]

ENVIRONMENT = {
    "name": "appworld",
    "config": {
        "python": str(PYTHON),
        "root": str(ROOT),
        "prompt": "tiny",
        "observation_max_tokens": 200,
        "max_worlds": 6,
        "sandbox_minimum": "none",
    },
}
LIMITS = Limits(max_turns=4, max_tokens_per_turn=400, max_context=4000, episode_deadline_s=DEADLINE_S)
MODEL = {"dtype": "float32", "max_context": 4096, "lora_rank": 8}


def speak(rng):
    return rng.choice(
        [
            "The profile.\n```python\nprint(apis.supervisor.show_profile())\n```",
            "```python\nprint(apis.api_docs.show_app_descriptions())\n```",
            "```python\nprint(1 / 0)\n```",
            "I do not know.",
        ]
    )


def pids_of(word):
    found = []
    for pid in descendants(os.getpid()):
        try:
            if word in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
        except OSError:
            continue
    return found


async def test_worlds_die_and_the_collection_completes(policy, tmp_path):
    model = {"path": str(policy / "model"), **MODEL}
    async with local_node(policy, tmp_path / "node", environment=ENVIRONMENT, model=model) as local:
        local.vllm.speak = speak
        local.vllm.delay = lambda body: 0.05
        tasks = (await local.call(local.client.tasks, "train")).tasks[:4]
        request = counter_request("appworld", tasks=tasks, rollouts_per_task=6, limits=LIMITS)
        await local.call(local.client.start_collection, request)
        progress = lambda: local.node.status()["collections"][0]  # noqa: E731
        await wait_until(lambda: progress()["finished"] >= 4)
        killed = pids_of("fork_server.py")
        assert killed
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        rollouts, end = await local.collect(request)
        assert end.reason == "complete"
        assert Counter((rollout.task_id, rollout.index) for rollout in rollouts) == {
            (task, index): 1 for task in tasks for index in range(6)
        }
        for rollout in rollouts:
            assert rollout.dataset.startswith("synthetic")
            assert rollout.end_reason == "turn_limit"
            assert len(rollout.requirements) >= 3
            assert not rollout.success
            assert "Task:" in rollout.messages[-1]["content"], "the reminder closes every observation"
            for turn, spoken in zip(rollout.turns, rollout.messages[-8::2], strict=True):
                assert turn.failed == ("1 / 0" in spoken["content"])
    assert not pids_of("fork_server.py"), "no world outlives the node"


async def test_the_agent_can_end_its_episode(policy, tmp_path):
    model = {"path": str(policy / "model"), **MODEL}
    async with local_node(policy, tmp_path / "node", environment=ENVIRONMENT, model=model) as local:
        local.vllm.speak = lambda rng: "```python\napis.supervisor.complete_task(status='fail')\n```"
        tasks = (await local.call(local.client.tasks, "train")).tasks[:2]
        rollouts, end = await local.collect(counter_request(tasks=tasks, rollouts_per_task=1, limits=LIMITS))
        assert end.reason == "complete"
        assert {(rollout.end_reason, len(rollout.turns)) for rollout in rollouts} == {("completed", 1)}
