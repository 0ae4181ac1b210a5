"""A shared GPU's trainer, node and server as processes that stop at a place when they are told to, to be killed there.

    python -m support.held_turns trainer|node|server PLACES WORDS...

The server is scripted in what it says, and computes the log-probs of it, and of prompts, under the adapter that it
holds. Each wake leaves it with another adapter in every name. It writes down under which weights a token was sampled.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

from aiohttp import web

from support.waiting import block_until

POLL_S = 0.01


class Places:
    """A folder in which a place is held, and in which whoever comes there says so."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _held(self, place: str) -> Path:
        return self._folder / f"held at {place}"

    def _there(self, place: str) -> Path:
        return self._folder / f"there at {place}"

    def hold(self, place: str) -> None:
        self._held(place).touch()

    def let_go(self, place: str) -> None:
        self._held(place).unlink()
        self._there(place).unlink()

    def wait_for(self, place: str, alive: Callable[[], None]) -> None:
        """Return when somebody is there; ``alive`` raises where nobody will come."""

        def there() -> bool:
            alive()
            return self._there(place).exists()

        block_until(there, 300.0)

    def come_to(self, place: str) -> None:
        """Stay there as long as it is held."""
        if self._held(place).exists():
            self._there(place).touch()
        while self._held(place).exists():
            time.sleep(POLL_S)

    def on_the_way(self, place: str, owner: Any, name: str) -> None:
        """Have whoever calls ``owner.name`` come to the place first."""
        work = getattr(owner, name)

        @wraps(work)
        def held(*arguments: Any, **options: Any) -> Any:
            self.come_to(place)
            return work(*arguments, **options)

        setattr(owner, name, held)


def trainer(places: Places, config: str) -> None:
    from omegaconf import OmegaConf

    from loop_appworld import LoopAppWorldRecipe
    from loop_recipes.engine import checkpoint
    from loop_recipes.engine.frozen_weights import FrozenWeights
    from loop_recipes.rollouts.node_source import NodeSource
    from support.small_runs import train

    places.on_the_way("asking for sleep", NodeSource, "sleep")
    places.on_the_way("weights coming, asleep", FrozenWeights, "to_device")
    places.on_the_way("update", LoopAppWorldRecipe, "update")
    places.on_the_way("weights leaving", FrozenWeights, "to_host")
    places.on_the_way("half a checkpoint", checkpoint, "save_file")
    places.on_the_way("asking to wake", NodeSource, "wake")
    train(OmegaConf.load(config))


def node(places: Places, config: str, log: str) -> None:
    from rollout_server import cli
    from rollout_server.inference import command, server, server_group

    def held_server(model: Any, servers: Any, port: int, *, cpu: bool) -> list[str]:
        words = [str(places._folder), str(port), model.path, log]
        return [sys.executable, "-m", "support.held_turns", "server", *words]

    server.server_command = held_server
    server_group.BACK_OFF_S = (0.05, 0.1)
    for module in (server, server_group):
        module.installed_vllm = lambda: command.Vllm("0.32.0", cpu=False)  # type: ignore[attr-defined]
    cli.main(["--config", config])


def server(places: Places, port: str, model: str, log: str) -> None:
    from model_families.chat import open_chat
    from support.fake_vllm import Sampled
    from support.random_policy import reference_model, token_logprobs
    from support.scripted_vllm import ScriptedVllm

    policy = cache(reference_model)

    class Computed(ScriptedVllm):
        def logprobs(self, name: str, token_ids: list[int]) -> list[float]:
            return token_logprobs(policy(Path(model), self.loaded.get(name)), token_ids)

        async def sleep(self, request: web.Request) -> web.Response:
            await asyncio.to_thread(places.come_to, "falling asleep")
            return await super().sleep(request)

        async def wake_up(self, request: web.Request) -> web.Response:
            await asyncio.to_thread(places.come_to, "waking")
            return await super().wake_up(request)

        async def generate(self, request: web.Request) -> web.StreamResponse:
            body = await request.json()
            if body["sampling_params"].get("prompt_logprobs") is None:
                await asyncio.to_thread(places.come_to, "collecting")
                return await super().generate(request)
            if body["model"] != "base":
                await asyncio.to_thread(places.come_to, "canary")
            if self.asleep or body["model"] not in (*self.loaded, "base"):
                return await super().generate(request)
            ids = body["token_ids"]
            values = self.logprobs(body["model"], ids)[1:]
            rows = [None, *({str(one): {"logprob": value}} for one, value in zip(ids[1:], values, strict=True))]
            return web.json_response({"choices": [], "prompt_logprobs": rows})

        async def sample(self, body: dict) -> Sampled | web.Response:
            sampled = await super().sample(body)
            ids, folder = body["token_ids"], self.loaded.get(body["model"])
            weights = b"" if folder is None else (folder / "adapter_model.safetensors").read_bytes()
            seen = {"request": body["request_id"], "weights": hashlib.sha256(weights).hexdigest()}
            print(json.dumps(seen), file=lines, flush=True)
            logprobs = self.logprobs(body["model"], ids + sampled.token_ids)[len(ids) :]
            return Sampled(sampled.token_ids, logprobs, sampled.finish_reason)

    fake = Computed(open_chat(Path(model)))
    fake.forgets = lambda: fake.loaded.update(dict.fromkeys(fake.loaded, Path(model).parent / "adapter1"))
    with Path(log).open("a") as lines:
        web.run_app(fake.app(), host="127.0.0.1", port=int(port), print=None, handle_signals=True)


if __name__ == "__main__":
    role, folder, *words = sys.argv[1:]
    {"trainer": trainer, "node": node, "server": server}[role](Places(Path(folder)), *words)
