"""A session of a running node, and OpenAI's client of it."""

from collections.abc import Sequence
from typing import Any

import openai

from agent_environments.program_protocol import SideCalls
from loop_formats.collection_request import Limits
from loop_plumbing.agent_timeout import AgentTimeout
from rollout_server.collecting.policy_sampler import PolicySampler
from rollout_server.endpoint.session import Session
from rollout_server.inference.command import BASE_MODEL_NAME
from support.counter_node import LocalNode, counter_request
from support.waiting import DEADLINE_S

HELLO = [{"role": "user", "content": "Hello."}]


class OpenSession:
    """Opened on a node, with a key; ``limits`` replace some of its own, ``side_calls`` are its rules for those."""

    def __init__(self, running: LocalNode, side_calls: Sequence[SideCalls] = (), **limits: Any):
        bounds = {"max_turns": 50, "max_tokens_per_turn": 64, "max_context": 1000, "episode_deadline_s": DEADLINE_S}
        request = counter_request(policy_mode="latest", limits=Limits(**{**bounds, **limits}))
        node = running.node
        sampler = PolicySampler(request.sampling, request.limits, 0, None, node._services)
        self.url = running.url
        base = PolicySampler(request.sampling, request.limits, 0, BASE_MODEL_NAME, node._services)
        aside = {"side_calls": side_calls, "base": base}
        self.session = Session("e", 7, request.limits, AgentTimeout(DEADLINE_S), sampler, node.tokens, **aside)
        self.key = node.endpoint.sessions.open(self.session)

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        settings = {"base_url": f"{self.url}/v1", "api_key": self.key, "max_retries": 0, "timeout": DEADLINE_S}
        return openai.AsyncOpenAI(**{**settings, **options})

    async def ask(self, messages: list[Any] = HELLO, **options: Any) -> Any:
        async with self.client() as client:
            return await client.chat.completions.create(model="gpt-4o", messages=messages, **options)
