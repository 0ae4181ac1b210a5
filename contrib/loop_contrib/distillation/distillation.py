"""On-policy distillation: the policy is moved towards a teacher, on the policy's own samples (arXiv 2306.13649,
2306.08543; Lu et al., 2025, "On-policy distillation").

With o the log-prob of a sampled token by the policy that sampled, and T the teacher's, the token's advantage is

    A_t = A + strength * (T_t - o_t)

where A is its advantage without a teacher, or 0 (``alone``). T_t - o_t is the sampled token's part of the reverse KL,
KL(policy || teacher) = E[o_t - T_t]: its expected gradient by ``A_t grad log p`` is minus that of the KL of the next
token, in the contexts that were sampled. Every rollout then carries signal, so none is left out.

The teacher is the base model, another adapter of it, or a model behind an endpoint that has the same token ids. A
log-prob that is missing or not finite ends the run: it would move the policy like any other.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import torch
from torch import Tensor

from loop_contrib.chat_client import AddressClient, NoCompletion
from loop_formats.rollout import POISONED_LOGPROB
from loop_formats.schema import Positive, from_mapping, require
from loop_plumbing.separate_task import result_of
from loop_recipes.algorithm.credit import Credit, CreditFailed, TrainingRun, with_token_advantages
from loop_recipes.algorithm.method_plan import MethodPlan
from loop_recipes.config.loop_config import EndpointConfig, LoopConfig
from loop_recipes.config.preflight import check_adapter_folder
from loop_recipes.engine.adapter_versions import AdapterVersions
from loop_recipes.engine.peft_export import load_adapter
from loop_recipes.engine.process_group import on_main_rank
from loop_recipes.engine.samples import Sample, ScoredSample
from loop_recipes.run.stop_request import StopRequested

STOP_ASKED_EVERY_S = 1.0

TeacherLogProbs = Callable[[Sequence[Sample]], Mapping[str, Tensor]]
"""The log-probs [n] of each rollout's sampled tokens by the teacher, by rollout id."""


class NoTeacher(CreditFailed):
    """The teacher gives no log-probs; the message says why."""


class Distillation(Credit):
    """Adds a term from a teacher model to the advantages of sampled tokens. The default teacher is the base model.

    Args:
        strength: factor, above 0, of (teacher's log-prob - sampling policy's) in the advantage of each token.
        alone: use this term in place of the advantage, so that nothing is learned from rewards.
        adapter: a PEFT adapter of the same base model, as the teacher.
        endpoint: arguments of :class:`~loop_recipes.config.loop_config.EndpointConfig` for a teacher with the same
            token ids. The endpoint must echo a prompt with log-probs, like vLLM.
    """

    plan = MethodPlan(keeps_samples_without_signal=True)
    figures: ClassVar[Mapping[str, str]] = {
        "teacher_kl": "mean over sampled tokens of the log-prob by the policy that sampled less the teacher's: an "
        "estimate of KL(policy || teacher) per token"
    }
    teacher: TeacherLogProbs

    def __init__(
        self,
        strength: Positive = 1.0,
        alone: bool = False,
        adapter: str | None = None,
        endpoint: Mapping[str, Any] | None = None,
    ) -> None:
        require(adapter is None or endpoint is None, "at most one of adapter and endpoint must be given")
        self._strength, self._alone, self._adapter = strength, alone, adapter
        self._endpoint = None if endpoint is None else from_mapping(EndpointConfig, endpoint, "endpoint")
        self._metrics: dict[str, float] = {}

    def check(self, config: LoopConfig) -> None:
        check_adapter_folder(f"{self.key}.adapter", self._adapter, config)

    def setup(self, run: TrainingRun) -> None:
        scorer, endpoint = run.scorer, self._endpoint
        if endpoint is not None:
            asked = _TeacherRequest(
                endpoint, f"{self.key}.endpoint", run.config.collection.deadline_s, run.stop_requested
            )
            self.teacher = asked
        elif self._adapter is not None:
            versions = AdapterVersions(scorer.model)
            versions.put(0, load_adapter(Path(self._adapter), scorer.model))
            self.teacher = lambda samples: scorer.logprobs(samples, 0, versions)
        else:
            self.teacher = lambda samples: scorer.logprobs(samples, None)

    def credit(self, samples: list[ScoredSample]) -> list[ScoredSample]:
        teachers = self.teacher(samples)
        gaps = [teachers[sample.rollout_id].double() - sample.old_logprobs.double() for sample in samples]
        advantages = [
            (self._strength * gap + (0.0 if self._alone else _own(sample))).float()
            for sample, gap in zip(samples, gaps, strict=True)
        ]
        self._metrics = {"teacher_kl": -torch.cat(gaps).mean().item()}
        return with_token_advantages(samples, advantages)

    def metrics(self) -> dict[str, float]:
        return self._metrics


def _own(sample: ScoredSample) -> Tensor | float:
    return sample.advantage if sample.token_advantages is None else sample.token_advantages.double()


class _TeacherRequest:
    """A teacher behind an endpoint. Rank 0 sends the requests for all ranks.

    Args:
        key: the config key of the endpoint, for error messages.
        deadline_s: most seconds for the answers about one collection.
        stop_requested: called during the wait; if it returns true, the wait ends with StopRequested.

    Raises:
        ConfigError: the endpoint's API key is missing.
    """

    def __init__(
        self, endpoint: EndpointConfig, key: str, deadline_s: float, stop_requested: Callable[[], bool]
    ) -> None:
        self._endpoint, self._key, self._headers = endpoint, key, endpoint.headers()
        self._deadline_s, self._stop_requested = deadline_s, stop_requested

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        logprobs = on_main_rank(lambda: result_of(self._ask_all(samples)))
        return {name: torch.tensor(values, dtype=torch.float64) for name, values in logprobs.items()}

    async def _ask_all(self, samples: Sequence[Sample]) -> dict[str, list[float]]:
        endpoint = self._endpoint
        at_once = asyncio.Semaphore(endpoint.max_concurrent)
        timeout = aiohttp.ClientTimeout(total=endpoint.request_timeout_s)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            client = AddressClient(session, f"{endpoint.url.rstrip('/')}/completions", _prompt_logprobs)

            async def logprobs_of(sample: Sample) -> list[float]:
                prompt = sample.token_ids.tolist()
                body = {"model": endpoint.model, "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0}
                try:
                    async with at_once:
                        return self._of_sampled_tokens(await client.ask({**body, **endpoint.request}), sample)
                except NoCompletion as error:
                    raise NoTeacher(f"{self._key}: rollout {sample.rollout_id}: {error}") from error

            jobs = [asyncio.ensure_future(logprobs_of(sample)) for sample in samples]
            try:
                async with asyncio.timeout(self._deadline_s):
                    waiting: set[asyncio.Future[list[float]]] = set(jobs)
                    while waiting:
                        done, waiting = await asyncio.wait(waiting, timeout=STOP_ASKED_EVERY_S)
                        for job in done:
                            job.result()
                        if self._stop_requested():
                            raise StopRequested("while waiting for the teacher")
            except TimeoutError:
                raise NoTeacher(
                    f"{self._key}: {endpoint.model} had not answered for {len(waiting)} of {len(jobs)} rollouts "
                    f"after {self._deadline_s:.0f} s (collection.deadline_s)"
                ) from None
            finally:
                for job in jobs:
                    job.cancel()
                await asyncio.gather(*jobs, return_exceptions=True)
            return {sample.rollout_id: job.result() for sample, job in zip(samples, jobs, strict=True)}

    def _of_sampled_tokens(self, logprobs: Sequence[Any], sample: Sample) -> list[float]:
        """Return the log-probs [n] of the tokens that the policy sampled.

        Raises:
            NoTeacher: a log-prob is missing or not finite.
        """
        model = self._endpoint.model
        if len(logprobs) < sample.tokens:
            raise NoTeacher(
                f"{self._key}: {model} gives {len(logprobs)} log-probs for the {sample.tokens} tokens of rollout "
                f"{sample.rollout_id}"
            )
        chosen = [logprobs[place] for place in sample.mask.nonzero().squeeze(1).tolist()]
        for value in chosen:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and math.isfinite(value) and POISONED_LOGPROB < value <= 1e-3):
                text = json.dumps(value)[:40]
                raise NoTeacher(
                    f"{self._key}: {model} gives {text} as a log-prob in rollout {sample.rollout_id}; nothing is "
                    "learned from it"
                )
        return [float(value) for value in chosen]


def _prompt_logprobs(data: Any, seconds: float) -> list[Any] | None:
    """Return the log-prob of each token of a completion that echoes its prompt; None if ``data`` is not one."""
    match data:
        case {"choices": [{"logprobs": {"token_logprobs": list(logprobs)}}]}:
            return logprobs
    return None
