"""vLLM's HTTP routes as the node uses them, answered in microseconds by a scripted policy.

The policy plays the counter environment: what it says depends on the seed and the prompt only, so a collection can be
repeated. The log-prob it claims for token number i of a prompt of n is -0.01 * ((n + i) % 7), so a test can recompute
what every token of a rollout must carry.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from aiohttp import web

from rollout_server.chat_tokens import ChatTokens


def expected_logprob(position: int) -> float:
    """What the fake claims for the token at ``position`` of a sequence."""
    return -0.01 * (position % 7)


class FakeVllm:
    """One server. Set ``delay``, ``answers``, ``fault`` or ``speak`` to change how it behaves.

    ``delay(body)`` is in seconds; a request waits until ``answers(body)`` is true; ``fault(body)`` may return a status
    to answer with; ``speak(rng)`` returns the text of a turn; ``logprob(position)`` what is claimed for a token.
    """

    def __init__(self, tokens: ChatTokens):
        self.tokens = tokens
        self.delay: Callable[[dict], float] = lambda body: 0.001
        self.answers: Callable[[dict], bool] = lambda body: True
        self.fault: Callable[[dict], int | None] = lambda body: None
        self.speak: Callable[[random.Random], str] = self.play
        self.logprob: Callable[[int], float] = expected_logprob
        self.requests: list[dict] = []
        self.aborted = 0
        self.loaded: dict[str, str] = {}

    def turn(self, body: dict) -> int:
        """Which request of its episode, from 1, the newest one is; ``body`` is any of them."""
        episode = body["request_id"].rpartition("-")[0]
        return sum(request["request_id"].rpartition("-")[0] == episode for request in self.requests)

    @staticmethod
    def play(rng: random.Random) -> str:
        call = rng.choice(["add(1)", "add(2)", "add(3)", "show()", "finish()", "add(99)"])
        return f"done\n```python\n{call}\n```"

    async def start(self) -> str:
        app = web.Application(client_max_size=1 << 30)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._health),
                web.get("/version", self._version),
                web.post("/v1/load_lora_adapter", self._load),
                web.post("/v1/unload_lora_adapter", self._unload),
                web.post("/inference/v1/generate", self._generate),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.loaded[body["lora_name"]] = body["lora_path"]
        return web.Response(text="loaded")

    async def _unload(self, request: web.Request) -> web.Response:
        self.loaded.pop((await request.json())["lora_name"], None)
        return web.Response(text="unloaded")

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt, sampling = body["token_ids"], body["sampling_params"]
        if "prompt_logprobs" in sampling:
            rows = [None, *({str(token): {"logprob": -1.0}} for token in prompt[1:])]
            return web.json_response({"choices": [], "prompt_logprobs": rows})
        self.requests.append(body)
        if body["model"] not in self.loaded:
            return web.json_response({"error": f"no model {body['model']}"}, status=404)
        status = self.fault(body)
        if status is not None:
            return web.json_response({"error": "fault"}, status=status)
        rng = random.Random(f"{sampling['seed']}/{len(prompt)}")
        try:
            await asyncio.sleep(self.delay(body))
            while not self.answers(body):  # noqa: ASYNC110 - the test decides, often in another thread
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        spoken = [*self.tokens.encode_text(self.speak(rng)), self.tokens.im_end]
        token_ids = spoken[: sampling["max_tokens"]]
        content = [{"token_id": t, "logprob": self.logprob(len(prompt) + i)} for i, t in enumerate(token_ids)]
        finish_reason = "stop" if len(token_ids) == len(spoken) else "length"
        choice = {"finish_reason": finish_reason, "token_ids": token_ids, "logprobs": {"content": content}}
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": 0}}
        return web.json_response({"choices": [choice], "usage": usage})
