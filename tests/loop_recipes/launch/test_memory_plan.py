"""The memory arithmetic, against figures known for Qwen2.5-32B."""

import json

import pytest

from loop_recipes.launch.memory_plan import GIB, plan_rollout_server, plan_trainer
from rollout_server.base_model import BaseModel
from rollout_server.config import NodeConfig
from rollout_server.schema import from_mapping

QWEN2_5_32B = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


@pytest.fixture
def shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5_32B))
    return BaseModel.read(tmp_path)


def _node(tensor_parallel_size):
    return from_mapping(
        NodeConfig,
        {
            "root": "runs/x/node",
            "model": {"path": "models/x", "dtype": "bfloat16", "max_context": 32768, "lora_rank": 16},
            "servers": {"count": 2, "tensor_parallel_size": tensor_parallel_size, "gpu_memory_utilization": 0.9},
            "environment": {"name": "counter", "config": {}},
        },
    )


def test_sizes_of_qwen2_5_32b(shape):
    assert shape.adapter_parameters(16) == 134_217_728
    assert shape.parameters == pytest.approx(32.76e9, rel=0.01)
    assert shape.kv_bytes_per_token == 262_144


def test_a_rank_of_eight_holds_an_eighth_of_the_base(shape):
    plan = plan_trainer(shape, lora_rank=16, tokens=32000, ranks=8, gpu_gib=79.0)
    assert plan.parts["base weights, bf16, sharded"] == pytest.approx(shape.parameters * 2 / 8 / GIB)
    assert plan.over is None


def test_one_gpu_is_refused_with_the_cure(shape):
    plan = plan_trainer(shape, lora_rank=16, tokens=32000, ranks=1, gpu_gib=79.0)
    assert "use more GPUs" in plan.over


def test_a_server_on_four_gpus_holds_about_twenty_full_episodes_and_on_one_none(shape):
    four = plan_rollout_server(shape, _node(4), gpu_gib=79.0)
    assert four.over is None
    episodes = int(four.notes[0].split(",")[1].split()[0])
    assert 15 <= episodes <= 30
    assert "raise servers.tensor_parallel_size" in plan_rollout_server(shape, _node(1), gpu_gib=79.0).over
