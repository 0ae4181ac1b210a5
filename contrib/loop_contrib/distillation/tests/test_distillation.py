"""A teacher's part in the advantages: its gradient, in float64, and what is no log-prob."""

import asyncio
import contextlib
import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from omegaconf import OmegaConf

from loop_appworld import LoopAppWorldRecipe
from loop_contrib.distillation.distillation import Distillation, NoTeacher
from loop_formats.run_files import read_rollouts
from loop_formats.run_folder import read_metrics
from loop_formats.schema import ConfigError
from loop_recipes.algorithm.method import check_run
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.run.stop_request import StopRequested
from support.learner_cases import VOCAB, a_run, make_samples
from support.random_policy import write_model
from support.rank_records import records, train_recorded
from support.ranks import on_ranks
from support.small_runs import replay_config, train
from support.waiting import DEADLINE_S


def with_teacher(**arguments):
    """``credit`` of a config."""
    return {"teacher": {"_component_": "loop_contrib.distillation.distillation.Distillation", **arguments}}


def advantages_of(distil, samples):
    return [sample.token_advantages for sample in distil.credit(samples)]


def test_the_expected_gradient_is_minus_that_of_the_reverse_kl():
    """Over every token that may come next, weighed by its probability."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(VOCAB, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    log_p, log_t = logits.log_softmax(-1), teacher.log_softmax(-1)
    (one,) = make_samples([4])
    every = [
        replace(one, rollout_id=str(token), old_logprobs=log_p.detach()[token][None], token_advantages=None)
        for token in range(VOCAB)
    ]
    distil = Distillation(alone=True)
    distil.teacher = lambda samples: {s.rollout_id: log_t[[int(s.rollout_id)]] for s in samples}
    chosen = torch.cat(advantages_of(distil, every)).double()
    (got,) = torch.autograd.grad((log_p.exp().detach() * chosen) @ log_p, logits, retain_graph=True)
    kl = (log_p.exp() * (log_p - log_t)).sum()
    (exact,) = torch.autograd.grad(-kl, logits)
    torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-8)
    assert distil.metrics()["teacher_kl"] == pytest.approx((log_p - log_t).mean().item())


def test_it_is_added_to_the_advantages_or_stands_alone():
    first, second = make_samples([20, 30])
    second = replace(second, token_advantages=torch.arange(len(second.old_logprobs), dtype=torch.float32))
    teachers = {s.rollout_id: s.old_logprobs + 0.5 for s in (first, second)}
    for alone, expected in ((False, [first.advantage, second.token_advantages]), (True, [0.0, 0.0])):
        distil = Distillation(strength=2.0, alone=alone)
        distil.teacher = lambda samples: teachers
        for got, own in zip(advantages_of(distil, [first, second]), expected, strict=True):
            torch.testing.assert_close(got, torch.zeros_like(got) + own + 1.0, rtol=1e-5, atol=1e-5)


def echoing(logprobs):
    """What an endpoint answers whose tokens of the prompt have these log-probs."""
    return {"choices": [{"text": "", "logprobs": {"tokens": [], "token_logprobs": logprobs}}]}


@contextlib.asynccontextmanager
async def teaching(answer):
    asked = []

    async def completions(request):
        asked.append(await request.json())
        answered = answer(asked[-1])
        if isinstance(answered, int):
            return web.Response(status=answered, text="no")
        return web.json_response(answered, dumps=json.dumps)

    application = web.Application()
    application.router.add_post("/v1/completions", completions)
    async with TestServer(application) as server:
        yield str(server.make_url("/v1")), asked


def asking(url, deadline_s=DEADLINE_S, stop=lambda: False, **options):
    """Advantages [n] of samples by the teacher at ``url`` alone."""
    distil = Distillation(alone=True, endpoint={"url": url, "model": "teacher", "api_key_env": None, **options})
    distil.setup(a_run(deadline_s, stop))
    return partial(advantages_of, distil)


async def test_an_endpoint_is_asked_for_the_tokens_as_they_were_sampled():
    samples = make_samples([20, 30, 9])

    def answer(body):
        return echoing([None, *(-token / 100 for token in body["prompt"][1:])])

    async with teaching(answer) as (url, asked):
        advantages = await asyncio.to_thread(asking(url, request={"user": "me"}), samples)
    for sample, got in zip(samples, advantages, strict=True):
        expected = -sample.token_ids[sample.mask] / 100 - sample.old_logprobs
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert sorted(len(body["prompt"]) for body in asked) == [9, 20, 30]
    fixed = {"model": "teacher", "max_tokens": 0, "echo": True, "logprobs": 0, "user": "me"}
    assert all({key: body[key] for key in fixed} == fixed for body in asked)


ODD = r"teacher gives \S+ as a log-prob in rollout rollout-0; nothing is learned"


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        *((value, ODD) for value in (None, float("nan"), float("-inf"), -9999.0, 0.5, "-1", True)),
        ("other tokens", "gives 5 log-probs for the 20 tokens of rollout rollout-0"),
    ],
)
async def test_what_is_no_log_prob_of_its_token_is_not_learned_from(odd, said):
    (sample,) = make_samples([20])
    place = int(sample.mask.nonzero()[2])

    def answer(body):
        count = 5 if odd == "other tokens" else len(body["prompt"])
        return echoing([odd if i == place else -1.0 for i in range(count)])

    async with teaching(answer) as (url, _):
        with pytest.raises(NoTeacher, match=said):
            await asyncio.to_thread(asking(url), [sample])


async def test_a_teacher_that_says_nothing_is_waited_for_only_so_long_and_not_after_a_stop(monkeypatch):
    async with teaching(lambda body: {"error": "no model"}) as (url, _):
        with pytest.raises(NoTeacher, match=r"teacher had not answered for 1 of 1 rollouts after 0 s \(collection\."):
            await asyncio.to_thread(asking(url, deadline_s=0.1), make_samples([20]))
        monkeypatch.setattr("loop_contrib.distillation.distillation.STOP_ASKED_EVERY_S", 0.01)
        with pytest.raises(StopRequested, match="the teacher"):
            await asyncio.to_thread(asking(url, stop=lambda: True), make_samples([20]))


def test_a_run_with_a_teacher_and_one_without(tmp_path):
    """The adapter that the teacher is, is the one that a run has trained; all rollouts count."""
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=2))
    train(cfg)
    teacher = str(tmp_path / "run/policies/policy-v0002")
    for name, section in (("adapter", {"adapter": teacher}), ("of_base", {"strength": 0.5})):
        train(OmegaConf.merge(cfg, {"output_dir": str(tmp_path / name), "credit": with_teacher(**section)}))
        lines = read_metrics(tmp_path / name)
        assert [line["kept_fraction"] for line in lines] == [1.0, 1.0]
        assert all(line["teacher_kl"] for line in lines[name == "of_base" :])
    assert read_metrics(tmp_path / "of_base")[0]["teacher_kl"] == pytest.approx(0.0, abs=1e-6), (
        "a new adapter is the base"
    )


def by_token(body):
    """A teacher's answer that anybody can compute."""
    return echoing([None, *(-token / 100 for token in body["prompt"][1:])])


@pytest.fixture
def taught(tmp_path):
    """Trains two iterations into ``<tmp>/<name>``, on so many ranks, with a teacher at this URL."""

    async def trained(url, name, ranks, **changes):
        section = {"endpoint": {"url": url, "model": "teacher", "api_key_env": None}}
        config = replay_config(tmp_path, iterations=2, credit=with_teacher(**section), **changes)
        await asyncio.to_thread(on_ranks, ranks, train_recorded, config, tmp_path / name)
        return records(tmp_path / name)

    return trained


@pytest.mark.integration
async def test_two_ranks_ask_an_endpoint_once_for_each_rollout_and_learn_the_same(taught):
    busy = [True]

    def answer(body):
        return 503 if busy and busy.pop() else by_token(body)

    async with teaching(answer) as (url, asked):
        (one,) = await taught(url, "one", 1)
        of_one = asked.copy()
        asked.clear()
        two = await taught(url, "two", 2)
    assert len(of_one) == 24 + 1, "a service that was busy is asked again"
    every = {tuple(body["prompt"]) for body in of_one}
    assert len(every) == len(asked) == 24
    assert {tuple(body["prompt"]) for body in asked} == every
    assert two[0] == two[1], "every rank has the same advantages"
    for alone, shared in zip(one["learned"], two[0]["learned"], strict=True):
        assert shared.keys() == alone.keys()
        assert all(shared[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-5) for name in alone)


@pytest.mark.integration
async def test_a_teacher_that_fails_for_one_rollout_ends_both_ranks_and_a_resumed_run_goes_on_exactly(taught, tmp_path):
    failing = []

    def answer(body):
        return 400 if body["prompt"] in failing else by_token(body)

    async with teaching(answer) as (url, _):
        whole = await taught(url, "whole", 2)
        spoilt = read_rollouts(tmp_path / "logs/made-up-i0002.jsonl")[5]
        failing.append(spoilt.token_ids)
        ended = [record["ended"] for record in await taught(url, "broken", 2)]
        assert ended[0][0] == "NoTeacher"
        assert re.search(rf"endpoint: rollout {spoilt.rollout_id}: \S+ answers 400: no", ended[0][1])
        assert ended[1] == ["RemoteError", ended[0][1]], "the other rank ends with the same reason"
        assert len(read_metrics(tmp_path / "broken")) == 1, "nothing is learned without it"
        failing.clear()
        again = await taught(url, "broken", 2, resume_from_checkpoint=True)
    assert [record["learned"] for record in again] == [record["learned"][1:] for record in whole]
    for file in sorted((tmp_path / "whole").glob("policies/*/adapter_model.safetensors")):
        assert (tmp_path / "broken" / file.relative_to(tmp_path / "whole")).read_bytes() == file.read_bytes()


def test_what_does_not_fit_is_refused_before_work(tmp_path):
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=1))

    def refused(message, **changes):
        with pytest.raises(ConfigError, match=message):
            LoopAppWorldRecipe(OmegaConf.merge(cfg, changes))

    refused(r"credit\.teacher\.adapter .*nowhere is not a PEFT adapter", credit=with_teacher(adapter="nowhere"))
    refused("loss.level is 'turn'; credit.teacher gives tokens", credit=with_teacher(), loss={"level": "turn"})
    endpoint = {"url": "http://127.0.0.1:1/v1", "model": "m"}
    refused("at most one of adapter and endpoint", credit=with_teacher(adapter="a", endpoint=endpoint))
    refused("url 'nowhere' must begin with", credit=with_teacher(endpoint={**endpoint, "url": "nowhere"}))
    node = {"replay": None, "url": "http://127.0.0.1:1", "token_env": "LOOP_TEST_TOKEN"}
    refill = {"refill_budget": 1.5}
    refused("no rollout is without signal", credit=with_teacher(), rollout_node=node, collection=refill)
    assert issubclass(NoTeacher, LoopAppWorldRecipe.errors), "it ends a run with one line"


@pytest.mark.fault("an adapter on other base weights")
def test_a_teacher_that_was_trained_on_other_base_weights_is_refused(tmp_path):
    replay_config(tmp_path, iterations=1)
    cfg = OmegaConf.load(tmp_path / "config.yaml")
    train(cfg)
    write_model(tmp_path / "base", seed=9)
    cfg.credit = with_teacher(adapter=str(tmp_path / "run/policies/policy-v0001"))
    cfg.output_dir = str(tmp_path / "new")
    with pytest.raises(ConfigError, match=r"^credit\.teacher\.adapter \S+ was trained on other base weights"):
        check_run(read_config(cfg, LoopConfig))
