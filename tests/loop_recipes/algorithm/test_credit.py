"""Credit of one's own: several one after the other, a loss beside the policy's, and what is kept over a resume."""

import json
import re
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from loop_formats.schema import ConfigError
from loop_recipes.algorithm.credit import Credit, TrainedCredit, with_token_advantages
from loop_recipes.algorithm.method import build_method, check_run
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.engine.checkpoint import load_training_state
from support.learner_cases import make_samples
from support.small_runs import replay_config, train

PAGE = Path(__file__).parents[3] / "docs/architecture.md"


class Plus(Credit):
    """Adds so much to each token, and counts how often it was asked, also in the run before."""

    figures: ClassVar = {"calls": "how often it was asked"}

    def __init__(self, more: float) -> None:
        self.more, self.calls = more, 0

    def credit(self, samples):
        self.calls += 1
        before = [s.advantage if s.token_advantages is None else s.token_advantages for s in samples]
        own = [torch.zeros_like(s.old_logprobs) + b + self.more for s, b in zip(samples, before, strict=True)]
        return with_token_advantages(samples, own)

    def metrics(self):
        return {"calls": float(self.calls)}

    def saved(self):
        return {"calls": self.calls}

    def restore(self, saved):
        self.calls = saved["calls"]


class Bias(TrainedCredit):
    """One number that learns the mean return."""

    metric = "bias_loss"
    figures: ClassVar = {"bias_loss": "mean squared error of the bias"}

    def make_weights(self, width):
        self.bias = nn.Parameter(torch.zeros(1))

    def credit(self, samples):
        return samples

    def forward(self, hidden):
        return self.bias.expand(len(hidden))

    def further_loss(self, hidden, batch):
        errors = (self(hidden) - batch.rewards[batch.rollout_index]).square()
        return torch.zeros_like(batch.rewards).index_add(0, batch.rollout_index, errors) / batch.episode_tokens


def component(kind, **arguments):
    return {"_component_": f"{__name__}.{kind.__name__}", **arguments}


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_example_of_the_page_gives_tokens_their_own():
    (source,) = re.findall(r"```python\n(from loop_recipes.algorithm.credit .*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    exec(source, names)
    for before, after in zip(
        samples := make_samples([20, 30]), names["LengthPenalty"](0.5).credit(samples), strict=True
    ):
        expected = before.advantage - 0.5 * before.turn_ids[before.mask]
        torch.testing.assert_close(after.token_advantages, expected.float())


def test_each_starts_from_what_the_one_before_gave_and_goes_on_over_a_resume(tmp_path):
    credit = {"one": component(Plus, more=1.0), "two": component(Plus, more=10.0)}
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=2, credit=credit))
    train(OmegaConf.merge(cfg, {"max_iterations": 1}))
    train(OmegaConf.merge(cfg, {"resume_from_checkpoint": True}))
    assert [line["calls"] for line in lines(tmp_path / "run")] == [1.0, 2.0]
    assert lines(tmp_path / "run")[0]["kept_fraction"] < 1.0, "the filter is on unless one keeps all"
    built = build_method(read_config(cfg, LoopConfig)).credit
    samples = make_samples([20, 30])
    for each in built.values():
        samples = each.credit(samples)
    torch.testing.assert_close(
        samples[0].token_advantages, torch.full_like(samples[0].old_logprobs, samples[0].advantage + 11)
    )
    assert [each.key for each in built.values()] == ["credit.one", "credit.two"]


@pytest.mark.parametrize("own", [{}, {"lr": 0.5}])
def test_a_loss_beside_the_policys_moves_its_own_weights_alone(tmp_path, own):
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=1))
    train(OmegaConf.merge(cfg, {"output_dir": str(tmp_path / "without")}))
    train(OmegaConf.merge(cfg, {"credit": {"mean": component(Bias, clip_grad_norm=1.0, **own)}}))
    plain, beside = (load_training_state(tmp_path / name / "checkpoints/iteration_0001") for name in ("without", "run"))
    for name, tensor in plain.adapters[1].items():
        torch.testing.assert_close(beside.adapters[1][name], tensor)
    learned = beside.further["mean"]["bias"].item()
    assert learned > (0.2 if own else 0.0), "its rate is the policy's unless it has one of its own"
    assert lines(tmp_path / "run")[0]["bias_loss"] > 0


@pytest.mark.parametrize(
    ("credit", "complaint"),
    [
        ({"own": {"_component_": "nowhere.Credit"}}, "credit.own._component_: cannot use 'nowhere.Credit'"),
        ({"own": {}}, "credit.own needs _component_"),
        ({"own": component(Plus)}, "credit.own: .* cannot be called with these keys"),
        ({"own": component(Plus, mor=1.0)}, "unknown key 'credit.own.mor'.* did you mean 'more'"),
        ({"own": component(Bias, lr=-1.0)}, "credit.own.lr must be at least 0, not -1.0"),
        ({"own": component(Bias, clip_grad_norm=0.0)}, "credit.own.clip_grad_norm must be above 0, not 0.0"),
        ({"rng": component(Bias)}, "credit: rng is not a name"),
        ({"my.own": component(Bias)}, "credit: my.own is not a name"),
        ({"own": 3}, "credit.own must be a mapping"),
        ({"own": {"_component_": "torch.nn.Identity"}}, r"torch.nn.Identity is not a Credit; derive it from"),
    ],
)
def test_what_is_no_credit_is_refused_before_work(tmp_path, credit, complaint):
    cfg = OmegaConf.to_container(OmegaConf.load(replay_config(tmp_path, iterations=1)))
    with pytest.raises(ConfigError, match=complaint):
        check_run(read_config({**cfg, "credit": credit}, LoopConfig))
