"""What is measured on held-out demonstrations: the chance of values and of whole episodes."""

import math

import pytest
import torch

from agent_environments.protocol import Message
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.logprobs import FullLogProbs
from loop_recipes.paths import loop_package
from loop_recipes.warm_start import tiny_model
from loop_recipes.warm_start.config import TinyModelConfig
from loop_recipes.warm_start.demonstration import Demonstration, render
from loop_recipes.warm_start.held_out import measure
from model_families.chat import open_chat
from model_families.chat.format import ChatFormat

ACTION = "I pay.\n```python\nprint(pay(amount=37, note='old bridge', access_token=venmo_token))\n```"
END = "Done.\n```python\ncomplete_task()\n```"


@pytest.fixture(scope="module")
def tokens() -> ChatFormat:
    return open_chat(loop_package("tiny_policy"))


def demonstration(task_id: str) -> Demonstration:
    steps = ((ACTION, "Paid.\nAs a reminder\n\nTask: Pay."), (END, ""))
    return Demonstration(task_id, None, 1.0, True, (Message("user", "Task: Pay."),), steps)


def test_a_uniform_policy_has_the_chance_of_its_tokens(tokens: ChatFormat):
    """With all embeddings zero every token has probability 1/v, so every figure is a count of tokens."""
    config = TinyModelConfig(1, 4, 2, 128, 384, max_seq_len=512, norm_eps=1e-6, rope_base=1e8, sharpness=12.0)
    decoder = tiny_model.build(config, tokens.vocab_size)
    with torch.no_grad():
        decoder.tok_embeddings.weight.zero_()
    one, other = demonstration("a_1"), demonstration("b_1")
    model = attach_head(decoder, FullLogProbs())
    held_out = measure(model, [one, other], tokens, {"a_1": "difficulty 1", "b_1": "difficulty 2"})
    uniform = math.log(tokens.vocab_size)
    assert held_out.loss == pytest.approx(uniform, rel=1e-5)
    assert held_out.values["amount"] == pytest.approx(math.exp(-uniform * len(tokens.encode_text("37"))), rel=1e-3)
    spoken = int(render(one, tokens).mask.sum())
    assert held_out.sampled == pytest.approx(
        dict.fromkeys(("difficulty 1", "difficulty 2"), math.exp(-uniform * spoken))
    )
    assert held_out.greedy == {"difficulty 1": 0.0, "difficulty 2": 0.0}


class Certain:
    """Stands in for a decoder with its head: every token has log-prob ``logprob``."""

    def __init__(self, logprob: float):
        self.logprob = logprob

    def __call__(self, token_ids, rows, targets):
        return type("Output", (), {"logprobs": torch.full(targets.shape, self.logprob)})


@pytest.mark.parametrize(("probability", "greedy"), [(0.6, 1.0), (0.4, 0.0)])
def test_greedy_decoding_is_sure_of_what_is_likelier_than_the_rest(tokens: ChatFormat, probability, greedy):
    held_out = measure(Certain(math.log(probability)), [demonstration("a_1")], tokens, {"a_1": "all"})
    assert held_out.greedy == {"all": greedy}
    assert held_out.values["amount"] == pytest.approx(probability ** len(tokens.encode_text("37")))
