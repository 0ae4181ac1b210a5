"""Five ways in which other projects' samplers were reported to have other weights than their trainers', played on a
node with a scripted vLLM; docs/sampler_weights.md quotes the line that each ends in.

``pytest -rP tests/rollout_server/test_sampler_weights.py`` prints the lines.
"""

import asyncio
import re
from pathlib import Path

import pytest
import torch

from loop_recipes.config.loop_config import GapConfig
from loop_recipes.engine.diagnostics import BROKEN_GAP, gap_metrics
from loop_recipes.engine.samples import made_up, scored
from rollout_server.client import NodeUnreachable, RolloutClient, RolloutNodeError
from rollout_server.inference import server as vllm_server
from rollout_server.inference import server_group
from rollout_server.policies import store
from support import fake_vllm
from support.counter_node import TOKEN, counter_request, local_node
from support.fake_vllm import prompt_logprob
from support.random_policy import write_adapter
from support.waiting import wait_until

PAGE = Path(__file__).parents[2] / "docs" / "sampler_weights.md"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(vllm_server, "POLL_S", 0.05)
    monkeypatch.setattr(server_group, "BACK_OFF_S", (0.05, 0.1))
    monkeypatch.setattr(store, "READY_TIMEOUT_S", 0.2)


def quote(report: str, line: str) -> None:
    """Print the line, and see that the page has it, whatever its numbers, ports and digests are."""

    def shape(text: str) -> str:
        return re.sub(r"-v\d+-\w+|http://\S+?(?=[),])|\d+(\.\d+)?(e-?\d+)?%?", "#", " ".join(text.split()))

    print(f"REPORT {report}: {line}")
    assert shape(line) in shape(PAGE.read_text()), f"{PAGE.name} does not quote: {line}"


def published(policy: Path, seed: int) -> tuple[Path, float]:
    """Write an adapter; returns its folder and what the fake answers for each prompt token under it."""
    folder = policy.parent / f"seed{seed}"
    write_adapter(folder, seed=seed)
    return folder, prompt_logprob(folder)


async def publish(local, version: int, folder: Path, value: float):
    canary = {"token_ids": [5, 6, 7], "positions": [1, 2], "logprobs": [value, value], "tolerance": 1e-3}
    return await local.call(local.client.publish_policy, version, folder, canary)


async def test_an_adapter_that_is_never_delivered(policy, tmp_path):
    """The server answers Success, and goes on as the base model."""
    folder, value = published(policy, 1)
    async with local_node(policy, tmp_path / "node") as local:
        local.vllm.mode = "only says it loads"
        with pytest.raises(RolloutNodeError) as refused:
            await publish(local, 1, folder, value)
        assert local.node.policies.versions() == [0], "the version is not served"
    quote("an adapter is never delivered", str(refused.value))


async def test_requests_that_the_base_model_answers():
    """Nothing at publication was wrong: the learner's log-probs of the sampled tokens tell, before the update."""
    sample = made_up("rollout", 64, 100, torch.Generator().manual_seed(0))
    served_by_the_base = scored(sample, sample.sampler_logprobs - 0.7)
    metrics = gap_metrics([served_by_the_base], GapConfig())
    assert metrics["gap_verdict"] == "broken"
    quote("requests sample the base model", BROKEN_GAP)


async def test_no_turn_of_a_run_names_the_base_model(policy, tmp_path):
    """Episodes that run beside publications name the version by its contents in every turn."""
    async with local_node(policy, tmp_path / "node") as local:
        local.vllm.delay = lambda body: 0.01
        collecting = asyncio.create_task(local.collect(counter_request(policy_version=0)))
        await wait_until(lambda: local.vllm.requests)
        for version in (1, 2):
            await publish(local, version, *published(policy, version))
        rollouts, _ = await collecting
        assert len(rollouts) == 12
        assert {body["model"].rpartition("-")[0] for body in local.vllm.requests} == {"policy-v0000"}
        assert {turn.policy_version for rollout in rollouts for turn in rollout.turns} == {0}


async def test_a_version_whose_name_is_not_found(policy, tmp_path):
    """The server forgot it: it is replaced, proven and asked again, and the episode goes on."""
    async with local_node(policy, tmp_path / "node") as local:
        await publish(local, 1, *published(policy, 1))
        local.vllm.loaded.clear()
        rollouts, end = await local.collect(counter_request(policy_version=1))
        assert (end.reason, len(rollouts)) == ("complete", 12)
        quote("a version's name is not found", local.node.servers.servers[0].last_error)


async def test_a_publication_while_turns_are_sampled(policy, tmp_path):
    """Nothing is aborted, and every rollout is of one version."""
    async with local_node(policy, tmp_path / "node") as local:
        local.vllm.answers = lambda body: False
        collecting = asyncio.create_task(local.collect(counter_request(policy_version=0)))
        await wait_until(lambda: len(local.vllm.requests) == 6)
        await publish(local, 1, *published(policy, 1))
        local.vllm.answers = lambda body: True
        rollouts, end = await collecting
        aborted = local.vllm.aborted
        assert (aborted, end.reason, len(rollouts)) == (0, "complete", 12)
        assert {turn.policy_version for rollout in rollouts for turn in rollout.turns} == {0}
    quote("a publication aborts what runs", f"{aborted} aborted, {len(rollouts)} of 12 rollouts complete")


async def test_a_server_that_wakes_with_stale_weights(policy, tmp_path, monkeypatch):
    """It samples nothing until it has those of the newest version again."""
    async with local_node(policy, tmp_path / "node", servers={"share": "trainer"}) as local:
        await publish(local, 1, *published(policy, 1))
        await local.call(local.client.sleep)
        with monkeypatch.context() as asleep:
            asleep.setattr(fake_vllm, "prompt_logprob", lambda folder: -0.5)
            with pytest.raises(NodeUnreachable):
                await local.call(RolloutClient(local.url, TOKEN, reconnect_s=0.0).wake)
            line = local.node.servers.servers[0].last_error
            assert not local.vllm.requests
        await local.call(local.client.wake)
        _, end = await local.collect(counter_request(policy_version=1))
        assert end.reason == "complete"
    quote("a server wakes with stale weights", line)
