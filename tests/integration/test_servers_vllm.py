"""Servers, router and policies over a real vLLM server on CPU, against a reference forward of the same weights.

The server is the one that the tests share. That a server killed in mid-generation costs no episode is a drill, with two
servers of its own; tests/rollout_server/inference shows the same of router and group with a scripted server.
"""

import asyncio
import os
import re
import shutil
import signal
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from loop_plumbing.process_guard import descendants
from model_families.chat.tokenizer import TextTokens, read_tokenizer
from rollout_server.config import ModelConfig, ServersConfig
from rollout_server.inference.router import Generation, Router
from rollout_server.inference.server import VllmServer
from rollout_server.inference.server_group import ServerGroup
from rollout_server.inference.server_metrics import parse_load
from rollout_server.policies import store as policies
from rollout_server.policies.adapter_check import AdapterError
from rollout_server.policies.store import PolicyStore
from support.random_policy import reference_logprobs, write_adapter
from support.waiting import COMMAND_S, DEADLINE_S, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

MAX_LORAS = 4
"""Of the server that the tests share."""

PROMPT = [(7 * index) % 300 + 3 for index in range(160)]
CANARY = PROMPT[::-1]
TOLERANCE = 1e-4
LONG = 1500
"""Tokens of a request that is to be met in the middle: seconds, where a look at /metrics takes a tenth of one."""


class House:
    """The servers, and adapters to publish on them."""

    def __init__(self, folder: Path, model: Path, **servers):
        self.folder = folder
        self.source = folder / "shared"
        self.model = ModelConfig(path=str(model), dtype="float32", max_context=2048, lora_rank=16)
        self.servers = ServersConfig(max_num_seqs=8, max_loras=MAX_LORAS, start_timeout_s=COMMAND_S, **servers)
        self.group = ServerGroup(self.model, self.servers, folder / "logs")
        self.store = PolicyStore(self.group, self.model, self.servers, folder / "policies")
        self.router = Router(self.group, self.servers.max_num_seqs)
        self.episodes: set[str] = set()

    @asynccontextmanager
    async def opened(self):
        await self.group.start()
        await self.router.start()
        try:
            yield self
        finally:
            await self.router.close()
            await self.group.stop()

    def adapter(self, seed: int) -> Path:
        write_adapter(self.source / f"seed{seed}", seed=seed)
        return self.source / f"seed{seed}"

    def reference(self, adapter: Path, token_ids: list[int]) -> list[float]:
        return reference_logprobs(Path(self.model.path), adapter, token_ids)

    async def publish(self, version: int, seed: int):
        adapter = self.adapter(seed)
        expected = self.reference(adapter, CANARY)
        positions = [1, 40, 159]
        canary = {
            "token_ids": CANARY,
            "positions": positions,
            "logprobs": [expected[position] for position in positions],
            "tolerance": 1e-3,
        }
        return await self.store.publish(version, adapter, canary)

    async def generate(
        self, episode_id: str, model: str, max_tokens: int = 24, seed: int = 5, stops: tuple[str, ...] = ()
    ) -> Generation:
        self.episodes.add(episode_id)
        return await self.router.generate(
            episode_id=episode_id,
            token_ids=PROMPT,
            model=model,
            max_tokens=max_tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            seed=seed,
            stop_token_ids=[],
            deadline=time.monotonic() + COMMAND_S,
            stops=stops,
        )

    def gap(self, generation: Generation, adapter: Path) -> float:
        """The largest distance between served and reference log-probs."""
        expected = self.reference(adapter, PROMPT + generation.token_ids)[len(PROMPT) :]
        return max(abs(a - b) for a, b in zip(generation.logprobs, expected, strict=True))

    async def wait_for_running(self, *requests: asyncio.Task, count: int = 1, on: VllmServer | None = None) -> None:
        """Return when ``count`` of ``requests`` are sampled by a server (``on``, if given), as it says itself."""
        running = 0.0
        while running < count:
            assert not all(request.done() for request in requests), "over before a server was seen to sample it"
            asked = self.group.servers if on is None else [on]
            texts = [await server.request("GET", "/metrics", timeout_s=DEADLINE_S) for server in asked]
            running = sum(parse_load(text).running for _, text in texts)

    async def served(self) -> set[str]:
        """Names of the adapters that the one server knows, those of other tests among them."""
        _, models = await self.group.servers[0].request("GET", "/v1/models", timeout_s=DEADLINE_S)
        return set(re.findall(r'"id":"(policy-[^"]+)"', models))

    async def clear(self) -> None:
        """Nothing of a test is left that could sway where the next one's requests go."""
        for episode_id in self.episodes:
            self.router.release(episode_id)
        self.episodes.clear()
        for version in self.store.versions():
            await self.store.retire(version)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(shared_vllm, tmp_path_factory):
    house = House(tmp_path_factory.mktemp("servers"), shared_vllm.model, urls=[shared_vllm.url])
    async with house.opened():
        yield house


@pytest_asyncio.fixture(loop_scope="module")
async def house(servers):
    yield servers
    await servers.clear()


async def test_served_logprobs_are_those_of_the_version_across_a_swap(house):
    first = await house.publish(1, seed=1)
    before = await house.generate("swap", first.name)
    warm = await house.generate("swap", first.name, seed=6)
    assert (before.cached_tokens, warm.server) == (0, before.server)
    assert warm.cached_tokens >= 128
    running = asyncio.create_task(house.generate("long", first.name, max_tokens=LONG))
    await house.wait_for_running(running)
    second = await house.publish(2, seed=2)
    after = await house.generate("swap", second.name)
    assert after.server == before.server
    assert after.cached_tokens == 0, "the prefix cached under version 1 is not for version 2"
    assert house.gap(before, house.adapter(1)) < TOLERANCE
    assert house.gap(warm, house.adapter(1)) < TOLERANCE
    assert house.gap(after, house.adapter(2)) < TOLERANCE
    assert house.gap(after, house.adapter(1)) > 0.1
    assert house.gap(await running, house.adapter(1)) < TOLERANCE


async def test_a_stop_text_ends_a_generation_at_the_token_that_completes_it(house):
    """Ids and log-probs are those of the same request without it, up to there."""
    version, tokens = await house.publish(1, seed=1), TextTokens(read_tokenizer(house.model.path))
    whole = await house.generate("stop", version.name)
    texts = [tokens.decode(whole.token_ids[:count]) for count in range(len(whole.token_ids) + 1)]
    stop = next(letter for letter in texts[-1][len(texts[8]) :] if letter.isascii() and letter.isprintable())
    kept = next(count for count, text in enumerate(texts) if stop in text)
    cut = await house.generate("stop", version.name, stops=(stop,))
    assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[:kept], "stop")
    assert cut.logprobs == pytest.approx(whole.logprobs[:kept], abs=TOLERANCE)
    assert (await house.generate("stop", version.name, stops=("never \u2603",))).token_ids == whole.token_ids


async def test_reused_name_and_folder_would_serve_a_stale_prefix(house, monkeypatch):
    """What naming by content prevents, shown by taking it away: the same test as above then sees wrong log-probs."""
    monkeypatch.setattr(policies, "policy_name", lambda version, digest: "policy-v0001-00000000")
    first = await house.store.publish(1, house.adapter(1))
    before = await house.generate("stale", first.name)
    assert house.gap(before, house.adapter(1)) < TOLERANCE
    await house.store.retire(1)
    second = await house.store.publish(1, house.adapter(2))
    assert second.name == first.name
    after = await house.generate("stale", second.name)
    assert after.cached_tokens >= 128
    assert house.gap(after, house.adapter(2)) > 0.01


def poison(adapter: Path) -> None:
    edit(adapter, lambda tensors: {name: torch.full_like(value, float("nan")) for name, value in tensors.items()})


def enlarge(adapter: Path) -> None:
    shutil.rmtree(adapter)
    write_adapter(adapter, seed=3, rank=32)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def edit(adapter: Path, change) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)


BAD = {
    poison: "holds a NaN",
    enlarge: "rank 32 is over the limit 16",
}
"""One of each kind; the other refusals have tests in tests/rollout_server/policies."""


async def test_bad_adapters_are_refused_while_the_running_version_serves_on(house):
    good = await house.publish(1, seed=1)
    served = await house.served()
    assert good.name in served
    for spoil, reason in BAD.items():
        running = asyncio.create_task(house.generate(f"beside {spoil.__name__}", good.name, max_tokens=60))
        adapter = house.source / f"bad-{spoil.__name__}"
        write_adapter(adapter, seed=3)
        spoil(adapter)
        with pytest.raises(AdapterError, match=reason):
            await house.store.publish(2, adapter)
        assert house.gap(await running, house.adapter(1)) < TOLERANCE
    # Well-formed, but not the weights that the trainer computed the canary with.
    expected = house.reference(house.adapter(1), PROMPT)
    canary = {"token_ids": PROMPT, "positions": [159], "logprobs": [expected[159]], "tolerance": 0.05}
    with pytest.raises(AdapterError, match="not the same weights"):
        await house.store.publish(2, house.adapter(4), canary)
    assert house.store.versions() == [1]
    assert house.gap(await house.generate("last", good.name), house.adapter(1)) < TOLERANCE
    assert [server.restarts for server in house.group.servers] == [0]
    assert await house.served() == served


async def test_full_house_serves_on_beside_a_version_that_is_refused_and_one_that_is_proven(house):
    """The server holds one version more than max_loras then; a request runs under one that stays."""
    full = list(range(1, MAX_LORAS + 1))
    first, *_, last = [await house.publish(version, seed=version) for version in full]
    running = asyncio.create_task(house.generate("beside", last.name, max_tokens=LONG))
    await house.wait_for_running(running)
    expected = house.reference(house.adapter(1), PROMPT)
    canary = {"token_ids": PROMPT, "positions": [159], "logprobs": [expected[159]], "tolerance": 0.05}
    new, other = MAX_LORAS + 1, MAX_LORAS + 2
    with pytest.raises(AdapterError, match="not the same weights"):
        await house.store.publish(new, house.adapter(other), canary)
    assert house.store.versions() == full
    assert house.gap(await house.generate("after the refusal", first.name), house.adapter(1)) < TOLERANCE
    proven = await house.publish(new, seed=new)
    assert house.store.versions() == [*full[1:], new]
    assert house.gap(await house.generate("new", proven.name), house.adapter(new)) < TOLERANCE
    assert house.gap(await running, house.adapter(MAX_LORAS)) < TOLERANCE
    assert [server.restarts for server in house.group.servers] == [0]


async def test_version_is_removed_under_an_aborted_request_without_harm(house):
    info = await house.publish(1, seed=1)
    house.store.acquire(1)
    running = asyncio.create_task(house.generate("aborted", info.name, max_tokens=LONG))
    await house.wait_for_running(running)
    assert not running.done()
    assert await house.store.retire(1) is False
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    house.router.release("aborted")
    house.store.release(1)
    folder = house.folder / "policies" / info.name
    await wait_until(lambda: not folder.exists())
    second = await house.publish(2, seed=2)
    assert house.gap(await house.generate("after", second.name), house.adapter(2)) < TOLERANCE
    assert [server.restarts for server in house.group.servers] == [0]


@pytest.mark.drill
async def test_killed_server_in_mid_generation_costs_no_episode(shared_vllm, tmp_path):
    endless = ["--tokenizer", str(shared_vllm.tokenizer)]
    house = House(tmp_path, shared_vllm.model, count=2, kv_cache_bytes=128 << 20, max_cpu_loras=8, extra_args=endless)
    async with house.opened():
        await kill_one_of_two(house)


async def kill_one_of_two(house):
    info = await house.publish(1, seed=1)
    await house.publish(2, seed=2)
    seeds = (6, 7, 14, 19)
    tasks = [asyncio.create_task(house.generate(f"kill {s}", info.name, max_tokens=LONG, seed=s)) for s in seeds]
    victim = house.group.servers[0]
    # The other server's two may be over by now: on a busy machine one server samples while the other waits its turn.
    await house.wait_for_running(*tasks, count=2, on=victim)
    old = [victim.pid, *descendants(victim.pid)]
    os.kill(old[1], signal.SIGKILL)  # the guard's only child: vLLM's API server
    generations = await asyncio.gather(*tasks)
    assert {generation.server for generation in generations} == {"vllm-1"}
    for generation in generations:
        assert len(generation.token_ids) == LONG
        assert house.gap(generation, house.adapter(1)) < TOLERANCE
    assert house.router.counters.moved_episodes == 2
    await wait_until(lambda: victim.state == "ready", COMMAND_S)
    assert victim.restarts == 1
    assert not any(map(exists, old))
    # It holds both versions again: new episodes go there, for it has more room.
    for version, seed in ((1, 1), (2, 2)):
        back = await house.generate(f"back {version}", house.store.acquire(version))
        assert back.server == "vllm-0"
        assert house.gap(back, house.adapter(seed)) < TOLERANCE
