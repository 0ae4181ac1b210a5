"""The memory arithmetic, against figures known for Qwen2.5-32B and against a count on the learner's own code."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from loop_formats.schema import from_mapping
from loop_recipes.plan.memory_plan import GIB, plan_host, plan_rollout_server, plan_trainer, plan_turns
from model_families.base_model import BaseModel
from model_families.families.family import FAMILIES
from rollout_server.config import NodeConfig
from support.families import PUBLISHED, write_config
from support.processes import IMPORT_PATH
from support.waiting import COMMAND_S


@pytest.fixture
def shape(tmp_path):
    return BaseModel.read(write_config(tmp_path, PUBLISHED["Qwen2.5-32B"]))


def _node(tensor_parallel_size):
    return from_mapping(
        NodeConfig,
        {
            "root": "runs/x/node",
            "model": {"path": "/models/x", "dtype": "bfloat16", "max_context": 32768, "lora_rank": 16},
            "servers": {"count": 2, "tensor_parallel_size": tensor_parallel_size, "gpu_memory_utilization": 0.9},
            "environment": {"name": "counter"},
        },
    )


def test_sizes_of_qwen2_5_32b(shape):
    assert shape.adapter_parameters(16) == 134_217_728
    assert shape.parameters == pytest.approx(32.76e9, rel=0.01)
    assert shape.kv_bytes_per_token == 262_144


def test_a_rank_of_eight_holds_an_eighth_of_the_base(shape):
    plan = plan_trainer(shape, lora_rank=16, tokens=32000, ranks=8, gpu_gib=79.0)
    assert plan.parts["base weights, bf16"] == pytest.approx(shape.parameters * 2 / 8 / GIB)
    assert plan.over is None


def test_attention_that_is_kept_is_a_part_of_its_own_and_the_first_to_go(shape):
    without, kept = (plan_trainer(shape, 16, 32000, 8, 60.0, keep) for keep in (False, True))
    assert kept.sum - without.sum == pytest.approx(64 * 32000 * 40 * (128 * 2 + 4) / GIB)
    assert "use keep_attention: False, enable_activation_offloading: True, more GPUs" in kept.over
    assert without.over is None


def test_inputs_on_the_host_leave_two_on_the_gpu(shape):
    here, there = (plan_trainer(shape, 16, 65536, 8, 79.0, offloads=offloads) for offloads in (False, True))
    assert here.sum - there.sum == pytest.approx(62 * 65536 * 5120 * 2 / GIB)
    assert "use enable_activation_offloading: True, more GPUs" in here.over
    assert there.over is None
    assert (here.offloaded, there.offloaded) == (0, 40.0)
    assert plan_host(shape, None, there, 8) == {"inputs of its layers": 320.0}
    assert plan_host(shape, _node(8), here, 8) == {}, "servers that never sleep pin nothing"


def test_ranks_that_share_rows_hold_one_more_tensor(shape):
    alone, shared = (plan_trainer(shape, 16, 32000, 8, 79.0, sharers=sharers) for sharers in (1, 4))
    assert shared.sum - alone.sum == pytest.approx(32000 * 40 * 128 * 2 / GIB)
    assert shared.title == "trainer, one of 8 ranks, micro-batches of 32000 tokens a rank, rows of 4 ranks"


def test_one_gpu_is_refused_with_the_cure(shape):
    plan = plan_trainer(shape, lora_rank=16, tokens=32000, ranks=1, gpu_gib=79.0)
    assert "use enable_activation_offloading: True, more GPUs" in plan.over


def test_a_server_on_four_gpus_holds_about_twenty_full_episodes_and_on_one_none(shape):
    four = plan_rollout_server(shape, _node(4), gpu_gib=79.0)
    assert four.over is None
    episodes = int(four.notes[0].split(", ")[1].split()[0])
    assert 15 <= episodes <= 30
    assert "raise servers.tensor_parallel_size" in plan_rollout_server(shape, _node(1), gpu_gib=79.0).over


TURNS = {  # model, GPU's GiB, ranks, tokens, KV cache in GiB: parameters without norms and biases, and what fits
    "Qwen2.5-1.5B": (24.0, 1, 16_384, 5, 1_543_569_408, (True, True)),
    "Qwen2.5-7B": (24.0, 1, 8_192, 1, 7_615_283_200, (True, True)),
    "Qwen2.5-7B, more cache": (24.0, 1, 8_192, 2, 7_615_283_200, (False, True)),
    "Qwen2.5-7B, longer rows": (24.0, 1, 16_384, 1, 7_615_283_200, (True, False)),
    "Qwen3-4B": (24.0, 1, 8_192, 4, 4_022_272_000, (True, True)),
    "Qwen2.5-14B": (48.0, 1, 8_192, 8, 14_769_192_960, (True, True)),
    "Qwen2.5-32B": (79.0, 8, 32_768, 40, 32_762_757_120, (True, True)),
}


@pytest.mark.parametrize("name", TURNS)
def test_a_gpu_in_turns_holds_the_base_once_at_a_time(tmp_path, name):
    gpu_gib, ranks, tokens, cache, parameters, fits = TURNS[name]
    shape = BaseModel.read(write_config(tmp_path, PUBLISHED[name.partition(",")[0]]))
    trainer = plan_trainer(shape, 16, tokens, ranks, gpu_gib, offloads=True)
    node = _node(ranks)
    servers = replace(node.servers, count=1, kv_cache_bytes=cache * GIB)
    node = replace(node, servers=servers, model=replace(node.model, max_context=8192))
    turns = plan_turns(shape, node, trainer, gpu_gib)
    assert shape.parameters == parameters
    weights, adapters = parameters * 2 / ranks, 2 * 2 * shape.adapter_parameters(16) / ranks
    host = plan_host(shape, replace(node, servers=replace(servers, share="trainer")), trainer, ranks)
    inputs = shape.layers * tokens * shape.width * 2
    assert sum(host.values()) == pytest.approx(ranks * (2 * weights + adapters + inputs) / GIB)
    assert turns.swap_s == pytest.approx((3 * weights + 2 * adapters) / 25e9)
    left = 3.0 if shape.width < 3000 else 4.0
    assert turns.training.sum == pytest.approx(trainer.sum + left)
    waits = 1.0 + 24 * shape.adapter_parameters(16) / ranks / GIB
    assert turns.sampling.sum == pytest.approx((weights + adapters) / GIB + left + cache + waits)
    tables = (str(turns.sampling), str(turns.training))
    assert (turns.sampling.over is None, turns.training.over is None) == fits, tables


COUNTER = Path(__file__).parents[2] / "support/memory_count.py"


def _qwen2(layers, width, inner, heads, keys, words, tied):
    """As its config.json describes it."""
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner, "vocab_size": words}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": keys, "tie_word_embeddings": tied}
    return BaseModel.of_family(sizes, FAMILIES["Qwen2ForCausalLM"])


SHAPES = {  # torchtune's builder: its sizes, but for the number of layers, and ranks
    "lora_qwen2_5_1_5b_instruct": (28, (1536, 8960, 12, 2, 151_936, True), 1),
    "lora_qwen2_5_7b_instruct": (28, (3584, 18_944, 28, 4, 152_064, False), 1),
    "lora_qwen2_5_32b_instruct": (64, (5120, 27_648, 40, 8, 152_064, False), 8),
}


def counted(cases):
    """GiB of each (builder, ranks, layers, tokens[, sharers])."""
    command = [sys.executable, str(COUNTER), *(":".join(map(str, case)) for case in cases)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": IMPORT_PATH}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line)["gib"] for line in done.stdout.splitlines()]


@pytest.mark.drill
def test_the_trainers_plan_is_what_the_learner_allocates():
    """Within 5 % at every size. Counted with few layers, since each further layer takes the same again."""
    sizes = (8_192, 65_536)
    cases = [
        (builder, ranks, layers, tokens)
        for builder, (*_, ranks) in SHAPES.items()
        for tokens in sizes
        for layers in (2, 4)
    ]
    eight = ("lora_qwen2_5_1_5b_instruct", 1, 8, sizes[0])
    shared = [("lora_qwen2_5_32b_instruct", 8, 2, sizes[1], sharers) for sharers in (1, 4)]
    found = dict(zip([*cases, eight, *shared], counted([*cases, eight, *shared]), strict=True))
    one, four = (found[case] for case in shared)
    assert four - one == pytest.approx(sizes[1] * 5120 * 2 / GIB, rel=0.05)
    for builder, (whole, sizes_of, ranks) in SHAPES.items():
        for tokens in sizes:
            two, four = (found[builder, ranks, layers, tokens] for layers in (2, 4))
            for layers, count in ((2, two), (4, four), (whole, two + (four - two) / 2 * (whole - 2))):
                planned = plan_trainer(_qwen2(layers, *sizes_of), 16, tokens, ranks, gpu_gib=79.0).sum
                assert planned == pytest.approx(count, rel=0.05), (builder, layers, tokens)
    two, four = (found["lora_qwen2_5_1_5b_instruct", 1, layers, sizes[0]] for layers in (2, 4))
    assert found[eight] - four == pytest.approx(2 * (four - two), rel=0.01), "linear in the number of layers"
