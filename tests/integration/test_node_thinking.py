"""A model that always thinks, on a real server: what is trained is what was served, thinking and answer apart."""

import json
import shutil

import pytest

from loop_formats.collection_request import Limits
from loop_formats.rollout import by_episode
from model_families.chat import open_chat
from support.chat_tokenizers import QWEN3_ADDED, QWEN3_SPECIAL, write_small, write_template
from support.node_reader import Reader, largest_gap, ready_node, request

pytestmark = pytest.mark.integration

LIMITS = Limits(max_turns=3, max_thinking_tokens=150, max_tokens_per_turn=12, max_context=2048)


@pytest.mark.parametrize("mode", ["kept", "stripped"])
def test_the_tokens_that_a_server_sampled_are_those_of_the_record(shared_vllm, tmp_path, mode):
    """The server's random policy has no tokenizer of its own: it is given one whose control tokens are Qwen3's."""
    model = tmp_path / "model"
    shutil.copytree(shared_vllm.model, model)
    write_small(model, "Qwen3ForCausalLM", QWEN3_SPECIAL, QWEN3_ADDED, words=256)
    shutil.copy(shared_vllm.model / "config.json", model)
    write_template(model, "qwen3_5", eos_token="<|im_end|>", pad_token="<|endoftext|>")
    config = shared_vllm.node_config(tmp_path / "node")
    config["model"] |= {"path": str(model), "thinking": mode}
    with ready_node(config, tmp_path) as (_, client):
        client.publish_policy(0, shared_vllm.adapter(0))
        client.start_collection(request(f"thinking-{mode}", ["reach3_1", "reach3_2"], limits=LIMITS))
        rollouts, end = Reader(client, f"thinking-{mode}").finish()
    assert end.reason == "complete"
    assert largest_gap(shared_vllm.model, rollouts, [shared_vllm.adapter(0)]) < 1e-3
    tokens = open_chat(model, mode)
    assert tokens.vocab_size <= json.loads((model / "config.json").read_text())["vocab_size"]
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    assert {turn.cut_in_thinking for turn in turns} == {True, False}, "in 150 tokens, </think> comes or does not"
    for rollout in rollouts:
        for turn in rollout.turns:
            thought = rollout.token_ids[turn.start : turn.start + turn.thinking_tokens]
            answer = turn.end - turn.start - turn.thinking_tokens
            # A tool call ends the thinking, unless the answer to it holds </think>.
            assert 0 < len(thought) <= 162
            assert answer <= 12
            next_token = rollout.token_ids[turn.start + len(thought) : turn.end][:1]
            assert turn.cut_in_thinking or {thought[-1], *next_token} & set(tokens.thinking_ends)
            assert rollout.messages[turn.message]["content"] == "" or not turn.cut_in_thinking
    for sequences in by_episode(rollouts):
        assert sum(len(sequence.turns) for sequence in sequences) == 3
        assert mode == "kept" or len(sequences) == 3
