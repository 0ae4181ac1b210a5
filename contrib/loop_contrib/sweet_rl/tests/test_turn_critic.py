"""SWEET-RL's critic: its advantages against float64, on packed and padded batches, and who may see what is hidden."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from contrib_support.hidden_tasks import MadeUpSecrets, breaks
from loop_contrib.sweet_rl.turn_critic import HIDDEN_HEAD, HiddenPrefix, TurnAdvantage, TurnCritic
from loop_formats.schema import ConfigError
from loop_recipes.algorithm.advantages import LeaveOneOut
from loop_recipes.algorithm.losses import ClippedPolicyLoss, LogLikelihood
from loop_recipes.algorithm.method import Method
from loop_recipes.algorithm.policy_update import PolicyUpdate
from loop_recipes.algorithm.preferences import DPO, ReturnPairs
from loop_recipes.config.loop_config import UpdateConfig
from loop_recipes.engine.adapter_versions import AdapterVersions
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.logprobs import TiledLogProbs
from loop_recipes.engine.model import adapter_parameters
from loop_recipes.engine.rank_batches import RankBatches
from model_families.chat import open_chat
from model_families.chat.messages import ChatMessage
from support.learner_cases import VOCAB, make_samples, tiny_lora_model
from support.random_policy import write_model
from support.small_runs import random_adapter


class Bytes:
    """A tokenizer of a small vocabulary, for models that have one."""

    def aside(self, text: str) -> list[int]:
        return [ord(letter) % VOCAB for letter in f"system {text}"]


PREFIX = HiddenPrefix(MadeUpSecrets(), Bytes())
SEQUENCE = 160


def an_update(model, loss, advantage=None, packed=False) -> PolicyUpdate:
    config = UpdateConfig(minibatch_rollouts=None, micro_batch_tokens=200, packed=packed, loss_divisor="mean")
    return PolicyUpdate(
        model=model,
        optimizer=torch.optim.SGD(adapter_parameters(model).values(), lr=0.1),
        method=Method(loss, advantage or LeaveOneOut()),
        versions=AdapterVersions(model),
        config=config,
        batches=RankBatches(config, torch.device("cpu")),
        seed=0,
    )


def float64_logprobs(adapter, token_ids, mask):
    """Of the sampled tokens under the test model with this adapter (None: without one), full logits in float64."""
    plain = tiny_lora_model(tied=True, max_seq_len=SEQUENCE)
    for name, parameter in adapter_parameters(plain).items():
        parameter.data.copy_(torch.zeros_like(parameter) if adapter is None else adapter[name])
    with torch.no_grad():
        logits = plain.double()(token_ids[None])[0, :-1]
    return logits.double().log_softmax(-1).gather(1, token_ids[1:, None])[:, 0][mask[1:]]


@pytest.mark.parametrize(
    ("packed", "per_turn", "from_adapter", "reference_sees_hidden"),
    [(True, "mean", True, True), (False, "mean", False, False), (False, "sum", True, True)],
)
def test_a_turns_advantage_is_the_mean_log_ratio_after_the_prefix(
    packed, per_turn, from_adapter, reference_sees_hidden
):
    model = attach_head(tiny_lora_model(tied=True, max_seq_len=SEQUENCE), TiledLogProbs(16, 32))
    shapes = {name: p.detach() for name, p in adapter_parameters(model).items()}
    adapter = random_adapter(shapes, seed=1)
    reference = random_adapter(shapes, seed=2) if from_adapter else None
    critic = TurnCritic(
        an_update(model, ClippedPolicyLoss(), packed=packed).scorer,
        adapter,
        reference,
        PREFIX,
        per_turn,
        reference_sees_hidden,
    )
    before = {name: p.detach().clone() for name, p in adapter_parameters(model).items()}
    samples = make_samples([33, 41, 27, 38])
    found = critic.advantages(samples)
    for sample in samples:
        prefix = torch.tensor(PREFIX.of(sample.task_id))
        told = torch.cat([prefix, sample.token_ids])
        told_mask = torch.cat([torch.zeros(len(prefix), dtype=torch.bool), sample.mask])
        own = float64_logprobs(adapter, told, told_mask)
        seen = (told, told_mask) if reference_sees_hidden else (sample.token_ids, sample.mask)
        ratio = own - float64_logprobs(reference, *seen)
        turns = sample.turn_ids[sample.mask]
        expected = [ratio[turns == turn] for turn in turns.unique()]
        expected = torch.stack([each.mean() if per_turn == "mean" else each.sum() for each in expected])
        torch.testing.assert_close(found[sample.rollout_id], expected, rtol=1e-4, atol=1e-5)
    for name, parameter in adapter_parameters(model).items():
        assert torch.equal(parameter, before[name]), "the actor's adapter is back in its place"


def test_the_prefix_stands_before_the_served_ids_and_changes_nothing_else(tmp_path):
    write_model(tmp_path)
    tokens = open_chat(tmp_path)
    sample = make_samples([30])[0]
    (told,) = HiddenPrefix(MadeUpSecrets(), tokens).before([sample])
    prefix = tokens.opening([ChatMessage("system", HIDDEN_HEAD + MadeUpSecrets().hidden_information("task-0"))])
    prefix = prefix[: prefix.index(tokens._id("<|im_start|>"), 1)]
    assert told.token_ids.tolist() == prefix + sample.token_ids.tolist()
    assert told.token_ids[told.mask].tolist() == sample.token_ids[sample.mask].tolist()
    assert told.turn_ids[told.mask].tolist() == sample.turn_ids[sample.mask].tolist()
    assert told.hidden_tokens == len(prefix)
    assert (told.rollout_id, told.reward, told.turns) == (sample.rollout_id, sample.reward, sample.turns)
    with pytest.raises(ConfigError, match="hidden_information: nothing is known of unknown"):
        HiddenPrefix(MadeUpSecrets(), tokens).before([replace(sample, task_id="unknown")])


@pytest.mark.parametrize(
    ("secret", "complaint"),
    [
        (
            breaks,
            r"hidden_information broke over task task-0: KeyError: 'x' \(.*hidden_tasks.py:\d+\)",
        ),
        (lambda task_id: None, "hidden_information of task task-0 is not a text but of type NoneType"),
    ],
)
def test_hidden_information_that_breaks_is_one_line(tmp_path, secret, complaint):
    write_model(tmp_path)
    information = SimpleNamespace(hidden_information=secret)
    with pytest.raises(ConfigError, match=complaint):
        HiddenPrefix(information, open_chat(tmp_path)).of("task-0")


@pytest.mark.parametrize("loss", [ClippedPolicyLoss(), LogLikelihood(), DPO()], ids=["clipped", "likelihood", "dpo"])
def test_no_actor_trains_on_what_is_hidden(loss):
    model = attach_head(tiny_lora_model(tied=True, max_seq_len=SEQUENCE), TiledLogProbs(16, 32))
    samples = make_samples([33, 41, 27])
    advantage = ReturnPairs() if loss.plan.compares_pairs else LeaveOneOut()
    update = an_update(model, loss, advantage)
    update.scorer.versions.keep(0)
    told = PREFIX.before(samples)
    with pytest.raises(ValueError, match="begins with hidden information, which only a critic may learn from"):
        update.run(told, 0, 1)
    with pytest.raises(ValueError, match="begins with hidden information"):
        update.train(update.prepare(told), 1)
    assert update.run(samples, 0, 1).metrics["steps"] == 1
    critic = an_update(model, TurnAdvantage(), ReturnPairs())
    critic.scorer.versions.keep(0)
    assert critic.train(critic.prepare(told), 1)[1]["steps"] == 1
