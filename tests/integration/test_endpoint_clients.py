"""Unmodified clients of others on the recording endpoint: what each call was served is the beginning of a sequence.

Optional: they have many dependencies, so they have an environment of their own. ENDPOINT_CLIENTS_PYTHON names a Python
with

    uv pip install litellm==1.83.0 openai-agents==0.24.0 "pydantic-ai-slim[openai]==2.68.0"

and ENDPOINT_CLIENTS_NODE a ``node_modules`` folder made by ``npm install openai@6.49.0``.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from rollout_server.collection_request import Limits
from support.counter_node import counter_request, local_node
from support.waiting import DEADLINE_S

PYTHON = os.environ.get("ENDPOINT_CLIENTS_PYTHON", "")
NODE_MODULES = os.environ.get("ENDPOINT_CLIENTS_NODE", "")
SUPPORT = Path(__file__).parents[1] / "support"
GRADE = [sys.executable, "-c", "print('{\"reward\": 1.0}')"]
SPOKEN = [
    'Two first.\n<tool_call>\n{"name": "add", "arguments": {"n":2}}\n</tool_call>',
    '<tool_call>{"arguments": {"n": 3}, "name": "add"}</tool_call> <tool_call>\n{"name":"add","arguments":{"n":4}}',
    " Für alle: 9 🎉\n",
]
"""Turns that no client hands back in the letters in which they were sampled."""

pytestmark = pytest.mark.integration

python = pytest.mark.skipif(
    not os.access(PYTHON, os.X_OK),
    reason='ENDPOINT_CLIENTS_PYTHON names no Python with litellm, openai-agents and "pydantic-ai-slim[openai]"',
)
node = pytest.mark.skipif(
    not (NODE_MODULES and shutil.which("node")),
    reason="ENDPOINT_CLIENTS_NODE names no node_modules with openai, or there is no node",
)


@pytest.mark.parametrize("how", ["whole", "stream"])
@pytest.mark.parametrize(
    "client",
    [
        pytest.param("litellm", marks=python),
        pytest.param("openai_agents", marks=python),
        pytest.param("pydantic_ai", marks=python),
        pytest.param("node", marks=node),
    ],
)
async def test_what_each_call_was_served_is_the_beginning_of_the_one_sequence(client, how, policy, tmp_path):
    if client == "node":
        command = ["node", str(SUPPORT / "endpoint_client.cjs"), how]
    else:
        command = [PYTHON, str(SUPPORT / "endpoint_clients.py"), client, how]
    config = {
        "command": command,
        "tasks": {"train": ["t_1"]},
        "grade_command": GRADE,
        "variables": {"NODE_PATH": NODE_MODULES, "PYTHONPATH": ""},
    }
    limits = Limits(max_turns=9, max_tokens_per_turn=200, max_context=4000, episode_deadline_s=DEADLINE_S)
    model = {"path": str(policy / "model"), "dtype": "float32", "max_context": 4096, "lora_rank": 8}
    environment = {"name": "harness", "config": config}
    async with local_node(policy, tmp_path / "node", environment=environment, model=model) as running:
        running.vllm.speak = lambda rng: SPOKEN[len(running.vllm.requests) - 1]
        request = counter_request(tasks=["t_1"], rollouts_per_task=1, limits=limits)
        rollouts, end = await running.collect(request)
        assert end.reason == "complete", end.error
        requests, tokens = running.vllm.requests, running.vllm.tokens
    [rollout] = rollouts
    assert rollout.extra["harness"]["exit_status"] == 0, rollout.extra["harness"]
    assert [len(rollout.turns), len(requests)] == [3, 3]
    for asked, spoken, turn in zip(requests, SPOKEN, rollout.turns, strict=True):
        served = asked["token_ids"] + [*tokens.encode_text(spoken), tokens.im_end]
        assert rollout.token_ids[: turn.end] == served
        assert all(rollout.mask[turn.start : turn.end])
    told = json.dumps(rollout.messages, ensure_ascii=False)
    assert all(f"added {n}" in told for n in (2, 3, 4))
