"""A teacher behind vLLM's completions: the log-probs of tokens that it did not sample."""

from dataclasses import replace

import pytest
import torch

from loop_contrib.distillation.distillation import Distillation
from rollout_server.inference.command import BASE_MODEL_NAME
from support.learner_cases import a_run, make_samples
from support.random_policy import reference_logprobs
from support.waiting import DEADLINE_S

pytestmark = pytest.mark.integration


def test_vllm_gives_the_teachers_log_probs_of_the_tokens_that_were_sampled(shared_vllm):
    endpoint = {"url": f"{shared_vllm.url}/v1", "model": BASE_MODEL_NAME, "api_key_env": None}
    samples = [replace(each, old_logprobs=torch.zeros_like(each.old_logprobs)) for each in make_samples([40, 90, 12])]
    distil = Distillation(endpoint=endpoint, alone=True)
    distil.setup(a_run(deadline_s=DEADLINE_S))
    for sample, taught in zip(samples, distil.credit(samples), strict=True):
        expected = reference_logprobs(shared_vllm.model, None, sample.token_ids.tolist())
        torch.testing.assert_close(taught.token_advantages, torch.tensor(expected)[sample.mask], rtol=0, atol=1e-4)
