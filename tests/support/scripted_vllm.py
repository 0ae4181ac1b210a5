"""A fake vLLM whose policy plays the counter environment.

What it says depends on the seed and the prompt only, so a collection can be repeated. The log-prob it claims for token
number i of a prompt of n is -0.01 * ((n + i) % 7), so a test can recompute what every token of a rollout must carry.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from aiohttp import web

from model_families.chat.format import ChatFormat
from support.fake_vllm import FakeVllm, Sampled


def expected_logprob(position: int) -> float:
    """What is claimed for the token at ``position`` of a sequence."""
    return -0.01 * (position % 7)


class ScriptedVllm(FakeVllm):
    """One server. Set ``delay``, ``answers``, ``fault`` or ``speak`` to change how it behaves.

    ``delay(body)`` is in seconds; a request waits until ``answers(body)`` is true; ``fault(body)`` may return a status
    to answer with; ``speak(rng)`` returns the text of a turn; ``logprob(position)`` what is claimed for a token.
    """

    def __init__(self, tokens: ChatFormat):
        super().__init__()
        self.tokens = tokens
        self.delay: Callable[[dict], float] = lambda body: 0.001
        self.answers: Callable[[dict], bool] = lambda body: True
        self.fault: Callable[[dict], int | None] = lambda body: None
        self.speak: Callable[[random.Random], str] = self.play
        self.logprob: Callable[[int], float] = expected_logprob

    @property
    def requests(self) -> list[dict]:
        """The requests for turns; those for a canary are left out."""
        return [body for body in self.seen if "prompt_logprobs" not in body["sampling_params"]]

    def turn(self, body: dict) -> int:
        """Which request of its episode, from 1, the newest one is; ``body`` is any of them."""
        episode = body["request_id"].rpartition("-")[0]
        return sum(request["request_id"].rpartition("-")[0] == episode for request in self.requests)

    @staticmethod
    def play(rng: random.Random) -> str:
        call = rng.choice(["add(1)", "add(2)", "add(3)", "show()", "finish()", "add(99)"])
        return f"done\n```python\n{call}\n```"

    async def sample(self, body: dict) -> Sampled | web.Response:
        prompt, sampling = body["token_ids"], body["sampling_params"]
        if (status := self.fault(body)) is not None:
            return web.json_response({"error": "fault"}, status=status)
        rng = random.Random(f"{sampling['seed']}/{len(prompt)}")
        await asyncio.sleep(self.delay(body))
        while not self.answers(body):  # noqa: ASYNC110 - the test decides, often in another thread
            await asyncio.sleep(0.01)
        spoken = [*self.tokens.encode_text(self.speak(rng)), self.tokens.turn_end]
        token_ids = spoken[: sampling["max_tokens"]]
        logprobs = [self.logprob(len(prompt) + place) for place in range(len(token_ids))]
        return Sampled(token_ids, logprobs, "stop" if len(token_ids) == len(spoken) else "length")
