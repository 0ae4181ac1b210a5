"""On-policy distillation: the policy is moved towards a teacher on what the policy itself sampled (arXiv 2306.13649,
2306.08543; Lu et al., 2025, "On-policy distillation").

With o the log-prob of a sampled token by the policy that sampled, and T the teacher's, the token's advantage is

    A_t = A + strength * (T_t - o_t)

where A is what it has without a teacher, or 0 (``alone``). T_t - o_t is the sampled token's part of the reverse KL,
KL(policy || teacher) = E[o_t - T_t]: its expected gradient by ``A_t grad log p`` is minus that of the KL of the next
token, in the contexts that were sampled. No rollout is without signal then, so none is left out.

The teacher is the base model, another adapter of it, or a model behind an endpoint that has the same token ids. A
log-prob that is none (not finite, or missing) ends the run: it would move the policy like any other.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import torch
from torch import Tensor

from agent_environments.chat_client import EndpointClient, NoCompletion
from loop_formats.rollout import POISONED_LOGPROB
from loop_recipes.algorithm.learner import Learner
from loop_recipes.config.loop_config import DistillationConfig, EndpointConfig
from loop_recipes.engine.adapter_versions import AdapterVersions
from loop_recipes.engine.peft_export import load_adapter
from loop_recipes.engine.process_group import on_main_rank
from loop_recipes.engine.samples import Sample, ScoredSample
from loop_recipes.run.stop_request import StopRequested

STOP_ASKED_EVERY_S = 1.0

TeacherLogProbs = Callable[[Sequence[Sample]], Mapping[str, Tensor]]
"""The log-probs [n] of each rollout's sampled tokens by the teacher, by rollout id."""


class NoTeacher(RuntimeError):
    """The teacher gives no log-probs; the message says why."""


class Distillation:
    """Gives sampled tokens their advantages with a teacher's part in them, on every rank.

    Args:
        teacher: whose log-probs.
    """

    def __init__(self, config: DistillationConfig, teacher: TeacherLogProbs) -> None:
        self._config = config
        self._teacher = teacher

    def __call__(self, samples: Sequence[ScoredSample]) -> tuple[list[Tensor], dict[str, float]]:
        """Advantages [n] of each sample, float32, and the metric ``teacher_kl``."""
        teachers = self._teacher(samples)
        gaps = [teachers[sample.rollout_id].double() - sample.old_logprobs.double() for sample in samples]
        advantages = [
            (self._config.strength * gap + (0.0 if self._config.alone else _own(sample))).float()
            for sample, gap in zip(samples, gaps, strict=True)
        ]
        return advantages, {"teacher_kl": -torch.cat(gaps).mean().item()}


def _own(sample: ScoredSample) -> Tensor | float:
    return sample.advantage if sample.token_advantages is None else sample.token_advantages.double()


def distillation(
    config: DistillationConfig, learner: Learner, deadline_s: float, stop_requested: Callable[[], bool]
) -> Distillation:
    """The component of a run; every rank must call it.

    Args:
        deadline_s: longest time in which an endpoint must have answered for a collection.
        stop_requested: asked while an endpoint is waited for; true ends the wait with StopRequested.

    Raises:
        ConfigError: the adapter does not fit the model, or the endpoint's key is missing.
    """
    endpoint = config.endpoint
    if endpoint is not None:
        headers = endpoint.headers()
        return Distillation(config, lambda samples: _asked(endpoint, headers, samples, deadline_s, stop_requested))
    if config.adapter is None:
        return Distillation(config, lambda samples: learner.update.logprobs(samples, None))
    versions = AdapterVersions(learner.model)
    versions.put(0, load_adapter(Path(config.adapter), learner.model))
    return Distillation(config, lambda samples: learner.update.logprobs(samples, 0, versions))


def _asked(
    endpoint: EndpointConfig,
    headers: Mapping[str, str],
    samples: Sequence[Sample],
    deadline_s: float,
    stop_requested: Callable[[], bool],
) -> dict[str, Tensor]:
    """Asked by rank 0, for all."""

    def ask() -> dict[str, list[float]]:
        return asyncio.run(_ask_all(endpoint, headers, samples, deadline_s, stop_requested))

    return {name: torch.tensor(values, dtype=torch.float64) for name, values in on_main_rank(ask).items()}


async def _ask_all(
    endpoint: EndpointConfig,
    headers: Mapping[str, str],
    samples: Sequence[Sample],
    deadline_s: float,
    stop_requested: Callable[[], bool],
) -> dict[str, list[float]]:
    at_once = asyncio.Semaphore(endpoint.max_concurrent)
    timeout = aiohttp.ClientTimeout(total=endpoint.request_timeout_s)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        client = EndpointClient(session, f"{endpoint.url.rstrip('/')}/completions", _prompt_logprobs)

        async def logprobs_of(sample: Sample) -> list[float]:
            prompt = sample.token_ids.tolist()
            body = {"model": endpoint.model, "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0}
            try:
                async with at_once:
                    return _of_sampled_tokens(await client.ask({**body, **endpoint.request}), sample, endpoint)
            except NoCompletion as error:
                raise NoTeacher(f"distillation.endpoint: rollout {sample.rollout_id}: {error}") from error

        jobs = [asyncio.ensure_future(logprobs_of(sample)) for sample in samples]
        try:
            async with asyncio.timeout(deadline_s):
                waiting: set[asyncio.Future[list[float]]] = set(jobs)
                while waiting:
                    done, waiting = await asyncio.wait(waiting, timeout=STOP_ASKED_EVERY_S)
                    for job in done:
                        job.result()
                    if stop_requested():
                        raise StopRequested("the teacher")
        except TimeoutError:
            raise NoTeacher(
                f"distillation.endpoint: {endpoint.model} had not answered for {len(waiting)} of {len(jobs)} rollouts "
                f"after {deadline_s:.0f} s (collection.deadline_s)"
            ) from None
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
        return {sample.rollout_id: job.result() for sample, job in zip(samples, jobs, strict=True)}


def _prompt_logprobs(data: Any, seconds: float) -> list[Any] | None:
    """Return what a completion that echoes its prompt says of each token; None if it is none."""
    match data:
        case {"choices": [{"logprobs": {"token_logprobs": list(found)}}]}:
            return found
    return None


def _of_sampled_tokens(found: Sequence[Any], sample: Sample, endpoint: EndpointConfig) -> list[float]:
    """The log-probs [n] of the tokens that the policy sampled.

    Raises:
        NoTeacher: one of them is none.
    """
    if len(found) < sample.tokens:
        raise NoTeacher(
            f"distillation.endpoint: {endpoint.model} gives {len(found)} log-probs for the {sample.tokens} tokens of "
            f"rollout {sample.rollout_id}"
        )
    chosen = [found[place] for place in sample.mask.nonzero().squeeze(1).tolist()]
    for value in chosen:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and POISONED_LOGPROB < value <= 1e-3):
            shown = json.dumps(value)[:40]
            raise NoTeacher(
                f"distillation.endpoint: {endpoint.model} gives {shown} as a log-prob in rollout {sample.rollout_id}; "
                "nothing is learned from it"
            )
    return [float(value) for value in chosen]
