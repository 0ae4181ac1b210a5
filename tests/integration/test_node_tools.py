"""Tool episodes through the node's own loop: scripted agents that call tools, and a real vLLM server."""

import pytest

from agent_environments.protocol import create_pool
from loop_recipes.run.metrics import behavior_metrics
from model_families.chat import open_chat
from support.adapter_support import word_spans
from support.episodes import open_pool
from support.node_reader import Reader, largest_gap, ready_node, request
from support.scripted_policy import collect
from support.texts import texts_beside
from support.tool_modules import COUNTER, call, write

pytestmark = pytest.mark.integration

ANSWER = texts_beside(__file__)["answer"]


async def test_64_stateful_episodes_at_once_in_the_nodes_loop(tmp_path):
    """The observation of every turn is of the episode's own counter, and nothing else stands in the sequence."""
    async with open_pool(
        create_pool("tools", {"module": write(tmp_path, COUNTER), "max_worlds": 16}, word_spans)
    ) as pool:
        tasks = [f"count{number}_1" for number in range(64)]
        rollouts, collector = await collect(
            pool, tmp_path, tasks, 2, lambda rng: call("add", amount=rng.randint(0, 3)), at_once=64, max_turns=3
        )
        assert collector.outcome == "complete"
        tokens = open_chat(tmp_path)
        for rollout in rollouts:
            shown = [message["content"] for message in rollout.messages if message["role"] == "user"]
            values = [int(text.split()[-2]) for text in shown[1:]]
            assert all(f"\n{rollout.task_id}: " in text for text in shown[1:])
            assert values == sorted(values)
            assert rollout.success == (values[-1] == int(rollout.task_id[5:-2]))
            assert tokens.decode(rollout.token_ids).count("<tool_response>") == 2, "the last answer is heard by nobody"
        assert any(rollout.success for rollout in rollouts)
        assert behavior_metrics(rollouts)["tool_calls"] == 3.0


def test_tools_and_a_mixture_on_a_real_server(shared_vllm, tmp_path):
    sums = {"name": "tools", "module": write(tmp_path, ANSWER)}
    environment = {"name": "mixed", "environments": {"sums": sums, "counter": {"name": "counter"}}}
    config = shared_vllm.node_config(tmp_path / "node", environment=environment)
    with ready_node(config, tmp_path) as (_, client):
        client.publish_policy(0, shared_vllm.adapter(0))
        tasks = ["sums/sum_1", "counter/reach3_1", "counter/reach3_2"]
        assert set(tasks) <= set(client.tasks("train").tasks)
        client.start_collection(request("tools", tasks, rollouts_per_task=3, environment_turns={"sums": 2}))
        rollouts, end = Reader(client, "tools").finish()
    assert (end.reason, len(rollouts)) == ("complete", 9)
    assert largest_gap(shared_vllm.model, rollouts, [shared_vllm.adapter(0)]) < 1e-3
    tokens = open_chat(shared_vllm.model)
    for rollout in rollouts:
        if rollout.task_id == "sums/sum_1":
            assert len(rollout.turns) == 2
            assert '"name": "answer"' in tokens.decode(rollout.token_ids[: rollout.turns[0].start])
            assert "no tool call" in tokens.decode(rollout.token_ids[rollout.turns[0].end : rollout.turns[1].start])
