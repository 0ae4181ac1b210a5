"""A node whose environment is behind a service records the rollouts of one that has it in process, id for id."""

from aiohttp.test_utils import TestServer

from agent_environments.counter import CounterPool
from agent_environments.services.server import EnvironmentServer
from agent_environments.services.service_pool import TOKEN_VARIABLE
from support.counter_node import counter_request, local_node

TOKEN = "a-token"


async def rollouts(policy, root, **changes):
    async with local_node(policy, root, **changes) as local:
        found, end = await local.collect(counter_request(seed=3))
    assert end.reason == "complete"
    return {rollout.rollout_id: rollout for rollout in found}


def without_times(rollout):
    turns = [(turn.start, turn.end, turn.policy_version, turn.finish_reason, turn.failed) for turn in rollout.turns]
    kept = ("task_id", "index", "seed", "dataset", "messages", "reward", "success", "requirements", "end_reason")
    return turns, {name: getattr(rollout, name) for name in kept}


async def test_a_served_environment_gives_the_same_rollouts(policy, tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    server = TestServer(EnvironmentServer(CounterPool(lambda text: []), ["train"], TOKEN).application())
    await server.start_server()
    service = {"url": str(server.make_url("")), "dataset": "counter", "observation_max_tokens": 200}
    served = await rollouts(policy, tmp_path / "served", environment={"name": "openenv", "config": service})
    own = await rollouts(policy, tmp_path / "own")
    await server.close()
    assert len(own) == 12
    assert served.keys() == own.keys()
    for rollout_id, rollout in own.items():
        other = served[rollout_id]
        assert (other.token_ids, other.mask, other.sampler_logprobs) == (
            rollout.token_ids,
            rollout.mask,
            rollout.sampler_logprobs,
        )
        assert without_times(other) == without_times(rollout)
