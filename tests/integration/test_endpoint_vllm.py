"""Episodes that programs play through the endpoint of a real node on a real vLLM server, and the learner of them."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import pytest
import torch
from omegaconf import OmegaConf

from loop_formats.collection_request import Limits
from loop_recipes.algorithm.learner import Learner
from loop_recipes.algorithm.method import build_method
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.engine.model import load_base
from loop_recipes.engine.peft_export import load_adapter
from loop_recipes.engine.samples import Sample, ScoredSample, episodes
from support.node_reader import TOKEN, Reader, ready_node, request
from support.random_harness import TOOL, append_turn, opening, picked
from support.small_runs import model_section, replay_config
from support.waiting import COMMAND_S

pytestmark = pytest.mark.integration

EPISODES = 6
CALLS = 8
LIMITS = Limits(max_turns=50, max_tokens_per_turn=16, max_context=1800, episode_deadline_s=COMMAND_S)
ELSEWHERE = {"command": None, "world": None, "tasks": {"train": ["t_1", "t_2"]}, "accept_reward": True}


class Agent:
    """Takes an episode of the node and plays it: echoes, edits, compactions, sub-agents, overlapping calls, retries.

    Attributes:
        sampled: how many tokens the policy sampled for it.
    """

    def __init__(self, url: str, seed: int):
        self.rng, self.sampled = random.Random(seed), 0
        self._http = httpx.Client(timeout=COMMAND_S)
        token = {"Authorization": f"Bearer {TOKEN}"}
        while (offer := self._http.post(f"{url}/v1/episodes", json={"wait_s": 60}, headers=token)).status_code == 204:
            pass
        taken = offer.raise_for_status().json()
        self._url, self._key = taken["base_url"], {"Authorization": f"Bearer {taken['api_key']}"}

    def play(self, swap: threading.Barrier) -> int:
        """The whole episode, with all others at ``swap`` in the middle; returns the count of sampled tokens."""
        try:
            return self._played(swap)
        except BaseException:
            swap.abort()  # the others would wait for it
            raise

    def _played(self, swap: threading.Barrier) -> int:
        with closing(self._http), ThreadPoolExecutor() as threads:
            histories = [opening(self.rng)]
            for number in range(CALLS):
                if number == CALLS // 2:
                    swap.wait()
                history = picked(histories, self.rng)
                overlapping = None
                if self.rng.random() < 0.2:
                    overlapping = threads.submit(self._ask, [*history, {"role": "user", "content": "Beside."}])
                said = self._ask(history, retried=self.rng.random() < 0.2)
                if overlapping is not None:
                    overlapping.result()
                append_turn(history, said, self.rng)
            self._post("/episode/finish", {"reward": self.rng.random()})
        return self.sampled

    def _ask(self, history: list[dict], retried: bool = False) -> dict:
        body = {"model": "policy", "messages": history, "tools": [TOOL]}
        answer = self._post("/chat/completions", body)
        if retried:
            assert self._post("/chat/completions", body, {"X-Stainless-Retry-Count": "1"}) == answer
        self.sampled += answer["usage"]["completion_tokens"]
        return answer["choices"][0]["message"]

    def _post(self, path: str, body: dict, headers: dict[str, str] | None = None) -> dict:
        """In ASCII, for httpx itself cannot write half a surrogate pair."""
        answer = self._http.post(self._url + path, content=json.dumps(body), headers=self._key | (headers or {}))
        assert answer.status_code == 200, answer.text
        return answer.json()


def recomputed(model, adapters, rollouts, folder) -> list[ScoredSample]:
    """The rollouts as an update of the learner leaves them, with its own log-probs of the versions that sampled."""
    cfg = OmegaConf.load(replay_config(folder, iterations=1))
    cfg.model, cfg.checkpointer.checkpoint_dir = model_section(model), str(model)
    cfg.initial_adapter = str(adapters[-1])
    cfg["update"] |= {"micro_batch_tokens": LIMITS.max_context, "min_abs_advantage": 0.0}
    conf = read_config(cfg, LoopConfig)
    learner = Learner(conf, *load_base(conf, torch.float32), torch.device("cpu"), None, method=build_method(conf))
    for version, adapter in enumerate(adapters):
        learner.versions.put(version, load_adapter(adapter, learner.model))
    samples = [Sample.from_rollout(rollout.validate()) for rollout in rollouts]
    return learner.update.run(samples, version=len(adapters) - 1, iteration=1).samples


def test_the_learner_agrees_with_vllm_on_what_random_harnesses_were_served(shared_vllm, tmp_path):
    """Over several sequences of an episode, across a swap of the policy, token for token."""
    adapters = [shared_vllm.adapter(0), shared_vllm.adapter(1)]
    config = shared_vllm.node_config(tmp_path / "node", environment={"name": "harness", **ELSEWHERE})
    with ready_node(config, tmp_path) as (_, client), ThreadPoolExecutor(EPISODES) as threads:
        client.publish_policy(0, adapters[0])
        tasks, count = ["t_1", "t_2"], EPISODES // 2
        client.start_collection(request("agents", tasks, rollouts_per_task=count, policy_mode="latest", limits=LIMITS))
        reader = Reader(client, "agents")
        swap = threading.Barrier(EPISODES, lambda: client.publish_policy(1, adapters[1]), COMMAND_S)
        agents = [threads.submit(lambda seed: Agent(client.url, seed).play(swap), seed) for seed in range(EPISODES)]
        failures = [failure for agent in agents if (failure := agent.exception(COMMAND_S)) is not None]
        if failures:
            raise ExceptionGroup("agents failed", failures)
        sampled = [agent.result() for agent in agents]
        rollouts, end = reader.finish()
    assert (end.reason, end.finished) == ("complete", EPISODES), end.error
    samples = recomputed(shared_vllm.model, adapters, rollouts, tmp_path)
    assert len(samples) == len(rollouts)
    of_episode = episodes(samples)
    assert sorted(sum(int(each.mask.sum()) for each in of_one) for of_one in of_episode) == sorted(sampled)
    assert sum(len(of_one) > 1 for of_one in of_episode) > EPISODES / 2, "most episodes are several sequences"
    assert any(len(rollout.policy_versions) == 2 for rollout in rollouts), "a swap within a sequence"
    gaps = torch.cat([(sample.old_logprobs - sample.sampler_logprobs).abs() for sample in samples])
    assert gaps.max() < 1e-4
