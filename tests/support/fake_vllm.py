"""vLLM's HTTP routes as the rollout node uses them, answered in microseconds: the one fake of vLLM.

What it samples is arithmetic on the prompt; :mod:`support.scripted_vllm` has it play the counter environment instead.
In this process by :meth:`FakeVllm.start`, or as a process by ``python fake_vllm.py --port P [--misbehave HOW]``.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

ENGINE_DEATH = """\
(EngineCore pid=11) ERROR 11-25 22:09:19 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=11) ERROR 11-25 22:09:19 [core.py:1512]   File "core.py", line 1, in run
(EngineCore pid=11) ERROR 11-25 22:09:19 [core.py:1512]     raise self._exception
(EngineCore pid=11) ERROR 11-25 22:09:19 [core.py:1512] RuntimeError: Unsupported CPU attention: head_dim=16
(APIServer pid=9) ERROR 11-25 22:09:19 [async_llm.py:906] AsyncLLM output_handler failed.
(APIServer pid=9) ERROR 11-25 22:09:19 [async_llm.py:906] Traceback (most recent call last):
(APIServer pid=9) ERROR 11-25 22:09:19 [async_llm.py:906]     raise self._format_exception(outputs) from None
(APIServer pid=9) ERROR 11-25 22:09:19 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore \
encountered an issue. See stack trace (above) for the root cause.
(APIServer pid=9) INFO 11-25 22:09:19 [launcher.py:304] [shutdown] API server: shutting down FastAPI HTTP server"""
"""What vLLM 0.32 writes when its engine dies of a request."""
TURNS = ["refuse sleep", "fail sleep", "only says it sleeps", "refuse wake", "only says it is awake"]
"""Modes of a server that samples well and cannot take turns with a trainer."""


def prompt_logprob(folder: Path) -> float:
    """What the fake answers for every prompt token under these weights: a function of their bytes."""
    content = b"".join(file.read_bytes() for file in sorted(folder.glob("*.safetensors")))
    return -1.0 - hashlib.sha256(content).digest()[0] / 256


@dataclass(frozen=True)
class Sampled:
    """What a request samples: ids and their log-probs, both [n]."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    cached_tokens: int = 0


class FakeVllm:
    """State and routes of one server. Tests set ``mode`` to have it fail, and read ``seen`` and ``loaded``.

    :meth:`sample` says what a request samples; an override may also wait, or answer with an error.
    """

    def __init__(self) -> None:
        self.loaded: dict[str, Path | None] = {}  # None: it computes as the base model
        self.log: list[tuple[str, str]] = []
        self.seen: list[dict] = []
        self.mode = "well"
        self.version = "0.32.0"
        self.max_model_len = 1 << 20
        self.serves_base = True
        self.load_metrics = {"num_requests_running": 0.0, "num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.0}
        self.tokens_per_scrape = 0.0
        self.scrapes = 0
        self.aborted = 0
        self.asleep = self.overwritten = False
        self.forgets: Callable[[], None] = lambda: None
        """What a wake does to what the server holds."""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/version", self.get_version),
                web.get("/v1/models", self.models),
                web.get("/metrics", self.metrics),
                web.post("/v1/load_lora_adapter", self.load),
                web.post("/v1/unload_lora_adapter", self.unload),
                web.post("/inference/v1/generate", self.generate),
                web.post("/sleep", self.sleep),
                web.post("/wake_up", self.wake_up),
                web.get("/is_sleeping", self.is_sleeping),
                web.post("/weight_checker", self.weight_checker),
            ]
        )
        return app

    async def start(self) -> str:
        """Listen on a free port of this machine; returns the address."""
        self._runner = web.AppRunner(self.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.mode == "dead engine" else 200)

    async def get_version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def models(self, _: web.Request) -> web.Response:
        names = ["base", *self.loaded][not self.serves_base :]
        return web.json_response({"data": [{"id": name, "max_model_len": self.max_model_len} for name in names]})

    async def metrics(self, _: web.Request) -> web.Response:
        self.scrapes += 1
        load = {**self.load_metrics, "generation_tokens_total": self.scrapes * self.tokens_per_scrape}
        lines = [f'vllm:{name}{{engine="0",model_name="m"}} {value}' for name, value in load.items()]
        return web.Response(text="\n".join(["# HELP vllm:x y", *lines, ""]))

    async def load(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, path = body["lora_name"], Path(body["lora_path"])
        self.log.append(("load", name))
        if self.mode == "die of load":
            self.mode = "dead engine"
        if self.mode in ("refuse load", "dead engine"):
            return web.json_response({"error": {"message": "no memory"}}, status=500)
        if name in self.loaded:
            return web.json_response({"error": {"message": f"'{name}' has already been loaded."}}, status=400)
        self.loaded[name] = path if self.mode != "only says it loads" else None
        return web.Response(text="Success")

    async def unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        known = self.loaded.pop(name, None)
        # vLLM still reads the folder until its requests are done, so it must be there now.
        self.log.append(("unload", name if known is None or known.is_dir() else f"{name} whose folder is gone"))
        return web.Response(status=200 if known is not None else 404)

    async def sleep(self, request: web.Request) -> web.Response:
        if status := {"refuse sleep": 404, "fail sleep": 500}.get(self.mode):
            return web.json_response({"error": "Not Found"}, status=status)
        while self.mode == "never sleeps":  # noqa: ASYNC110 - until the test sets another mode
            await asyncio.sleep(0.01)
        self.log.append(("sleep", str(request.query.get("level"))))
        self.asleep = self.mode != "only says it sleeps"
        return web.json_response({"status": "sleeping", "level": 1})

    async def wake_up(self, _: web.Request) -> web.Response:
        self.log.append(("wake", ""))
        if self.mode == "refuse wake":
            return web.json_response({"error": "CUDA out of memory"}, status=500)
        self.asleep = self.mode == "only says it is awake"
        self.forgets()
        return web.json_response({"status": "awake", "tags": None})

    async def is_sleeping(self, _: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self.asleep})

    async def weight_checker(self, request: web.Request) -> web.Response:
        self.overwritten |= (await request.json())["action"] == "reset" and self.mode != "keeps its weights"
        return web.json_response({"checksums": {"embedding": "1f"}, "mismatches": ["embedding"] * self.overwritten})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(body)
        if self.asleep:
            self.log.append(("asked while asleep", body["model"]))
            return web.json_response({"error": {"message": "the engine sleeps"}}, status=500)
        token_ids, sampling = body["token_ids"], body["sampling_params"]
        if body["model"] not in (*self.loaded, "base"):
            return web.json_response({"error": {"message": f"The model {body['model']} does not exist."}}, status=404)
        if self.mode == "error":
            return web.json_response({"error": {"message": "EngineCore encountered an issue."}}, status=500)
        try:
            while self.mode == "hang":  # noqa: ASYNC110 - until the test sets another mode
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        if self.mode == "hang up":
            request.transport.abort()
            return web.Response()
        if sampling.get("prompt_logprobs") is not None:
            folder = self.loaded.get(body["model"])
            value = (-1.0 if folder is None else prompt_logprob(folder)) - self.overwritten
            value = float("-9999") if self.mode == "poisoned" else value
            rows = [None, *({str(token): {"logprob": value}} for token in token_ids[1:])]
            return web.json_response({"choices": [], "prompt_logprobs": rows})
        try:
            sampled = await self.sample(body)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        if isinstance(sampled, web.Response):
            return sampled
        content = [
            {"token_id": token, "logprob": -9999.0 if self.mode == "poisoned" else logprob}
            for token, logprob in zip(sampled.token_ids, sampled.logprobs, strict=True)
        ]
        if self.mode == "cut short":
            content = content[:-1]
        finish = "abort" if self.mode == "abort" else sampled.finish_reason
        choice = {"finish_reason": finish, "token_ids": sampled.token_ids, "logprobs": {"content": content}}
        cached = {"cached_tokens": sampled.cached_tokens}
        usage = {"prompt_tokens": len(token_ids), "prompt_tokens_details": cached}
        return web.json_response({"choices": [choice], "usage": usage})

    async def die(self, _: web.Request) -> web.Response:
        """End as vLLM does whose engine dies of a request."""
        print(ENGINE_DEATH, flush=True)
        os._exit(0)

    async def spin(self, _: web.Request) -> web.Response:
        """Answer, but only after a second of work in which nothing else is answered."""
        until = time.process_time() + 1.0
        while time.process_time() < until:
            pass
        return web.Response()

    async def sample(self, body: dict) -> Sampled | web.Response:
        """What this request samples."""
        prompt, most = body["token_ids"], body["sampling_params"]["max_tokens"]
        token_ids = [(sum(prompt) + step) % 300 for step in range(most)]
        return Sampled(token_ids, [-0.5] * most, "length", cached_tokens=len(prompt) // 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    hows = ["exit", "never ready", "slow start", "slow answers", "die of requests", "keeps its weights", *TURNS]
    parser.add_argument("--misbehave", choices=hows)
    arguments, _ = parser.parse_known_args()
    # As vLLM has engine processes: one that changes session and would outlive a plain kill.
    subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(600)"])
    print("the fake is starting", flush=True)
    if arguments.misbehave == "exit":
        print("ValueError: no such model", flush=True)
        sys.exit(3)
    if arguments.misbehave == "never ready":
        asyncio.run(asyncio.sleep(600))
    fake = FakeVllm()
    if arguments.misbehave == "slow start":
        asyncio.run(fake.spin(None))
        asyncio.run(fake.spin(None))
    if arguments.misbehave == "slow answers":
        fake.health = fake.spin
    if arguments.misbehave == "die of requests":
        fake.generate = fake.die
    if arguments.misbehave in ("keeps its weights", *TURNS):
        fake.mode, fake.tokens_per_scrape = arguments.misbehave, 100.0
    web.run_app(fake.app(), host="127.0.0.1", port=arguments.port, print=None, handle_signals=True)


if __name__ == "__main__":
    main()
