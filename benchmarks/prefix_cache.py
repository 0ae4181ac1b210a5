"""How many prompt tokens come from the prefix cache, by how a task's rollouts are spread over two servers.

    python benchmarks/prefix_cache.py [--draws 3] [--json results.json]

41 tasks x 6 rollouts, started by the node's Collector, on two scripted servers of 16 or 128 sequences, by the node's
Router. A server keeps the blocks of 16 tokens that it saw last, as many as four conversations a sequence have. An
opening has 4,000 tokens, of which all tasks share 1,200; each of an episode's 2 to 12 turns adds 60 sampled tokens and
an observation of 240. A turn takes the time that its uncached tokens and its sampled ones would (20,000 and 40 tokens
a second), and as long again in the environment, all of it a hundredth.

- ``ours``: a task's rollouts go to one server while it has room.
- ``spread``: the same router, with ids that do not say which rollouts are of one task.

``cached_fraction`` is of all prompt tokens; ``opening_cached_fraction`` of those of first turns;
``prefilled_tokens_per_episode`` is what was not cached; ``uneven`` is the larger server's share of all turns, over a
half. Means over the draws.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import OrderedDict, defaultdict
from pathlib import Path

# The root too, because folders of tests/ are called like packages and hide those that are installed.
sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "tests"))

from loop_formats.collection_request import CollectionRequest
from loop_formats.ids import rollout_id
from rollout_server.collecting.collector import Collector, EpisodeKey
from rollout_server.config import ModelConfig, ServersConfig
from rollout_server.inference.router import Router
from rollout_server.inference.server_group import ServerGroup
from support.fake_vllm import FakeVllm, Sampled

TASKS, ROLLOUTS, BLOCK = 41, 6, 16
SHARED, OPENING, SAMPLED, OBSERVED, MOST_TURNS = 1200, 4000, 60, 240, 12
PREFILLED_PER_S, SAMPLED_PER_S, SPEED = 20_000, 40, 100
CONVERSATION = OPENING + MOST_TURNS * (SAMPLED + OBSERVED)


class CachingVllm(FakeVllm):
    """A server with a prefix cache of ``blocks`` blocks; the blocks used longest ago go first."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self._most = blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    async def sample(self, body: dict) -> Sampled:
        prompt, most = body["token_ids"], body["sampling_params"]["max_tokens"]
        keys, key = [], hash(body["model"])
        for start in range(0, len(prompt) - BLOCK, BLOCK):
            key = hash((key, *prompt[start : start + BLOCK]))
            keys.append(key)
        cached = next((number for number, key in enumerate(keys) if key not in self._blocks), len(keys)) * BLOCK
        for key in keys:
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
        await asyncio.sleep(((len(prompt) - cached) / PREFILLED_PER_S + most / SAMPLED_PER_S) / SPEED)
        token_ids = [random.randrange(30_000) for _ in range(most)]
        return Sampled(token_ids, [-0.5] * most, "length", cached_tokens=cached)


class Tokens:
    """Counts of one run."""

    def __init__(self) -> None:
        self.prompt = self.cached = self.opening = self.opening_cached = 0
        self.turns: dict[str, int] = defaultdict(int)


async def play(router: Router, name: str, key: EpisodeKey, rng: random.Random, tokens: Tokens) -> None:
    """Play an episode; its opening depends on its task, all else on ``rng``."""
    opening = random.Random(key.task_id)
    ids = [*range(SHARED), *(opening.randrange(30_000) for _ in range(OPENING - SHARED))]
    for turn in range(rng.randint(2, MOST_TURNS)):
        answer = await router.generate(
            episode_id=name,
            token_ids=ids,
            model="base",
            max_tokens=SAMPLED,
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            seed=0,
            stop_token_ids=(),
            deadline=time.monotonic() + 600.0,
        )
        tokens.prompt += len(ids)
        tokens.cached += answer.cached_tokens
        tokens.turns[answer.server] += 1
        if not turn:
            tokens.opening += len(ids)
            tokens.opening_cached += answer.cached_tokens
        await asyncio.sleep(SAMPLED / SAMPLED_PER_S / SPEED)
        ids += [*answer.token_ids, *(rng.randrange(30_000) for _ in range(OBSERVED))]
    router.release(name)


async def run(slots: int, together: bool, draw: int) -> dict[str, float]:
    """Play all episodes, half of ``slots`` on each server; returns the metrics."""
    fakes = [CachingVllm(slots // 2 * 4 * CONVERSATION // BLOCK) for _ in range(2)]
    config = ServersConfig(urls=[await fake.start() for fake in fakes], max_num_seqs=slots // 2)
    request = CollectionRequest("benchmark", [f"task_{number}" for number in range(TASKS)], ROLLOUTS, 0)
    collector, tokens, rng = Collector(request), Tokens(), random.Random(draw)
    running: dict[asyncio.Task[None], EpisodeKey] = {}
    with tempfile.TemporaryDirectory() as folder:
        group = ServerGroup(ModelConfig(path="unused"), config, Path(folder))
        await group.start()
        async with Router(group, config.max_num_seqs) as router:
            while collector.outcome is None:
                while len(running) < slots and (key := collector.start_next()) is not None:
                    name = rollout_id(request.id, key.task_id, key.index, key.attempt)
                    name = name if together else name.replace("/", ":")
                    own = random.Random(rng.random())
                    running[asyncio.create_task(play(router, name, key, own, tokens))] = key
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                    collector.finished(running.pop(task))
        await group.stop()
    for fake in fakes:
        await fake.stop()
    return {
        "cached_fraction": tokens.cached / tokens.prompt,
        "opening_cached_fraction": tokens.opening_cached / tokens.opening,
        "prefilled_tokens_per_episode": (tokens.prompt - tokens.cached) / TASKS / ROLLOUTS,
        "uneven": max(tokens.turns.values()) / sum(tokens.turns.values()) * 2 - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for slots in (32, 256):
        for name, together in (("ours", True), ("spread", False)):
            runs = [asyncio.run(run(slots, together, draw)) for draw in range(options.draws)]
            case = f"{name} 246_episodes_{slots}_slots_two_servers"
            for metric in runs[0]:
                value, unit = sum(each[metric] for each in runs) / len(runs), "tokens" if "_per_" in metric else ""
                rows.append({"case": case, "metric": metric, "value": value, "unit": unit})
                print(f"{case:46}{metric:32}{value:12.3f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
