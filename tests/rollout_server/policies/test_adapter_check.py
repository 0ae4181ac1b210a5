import io
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from loop_recipes.engine.peft_export import read_adapter, write_empty_adapter
from model_families.base_model import BaseModel
from rollout_server.policies.adapter_check import AdapterError, check_adapter
from support.random_policy import MODEL_CONFIG, write_adapter
from support.texts import texts_beside

TABLES = texts_beside(__file__)

Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
PATHS = [*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def base(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL_CONFIG))
    return BaseModel.read(tmp_path)


@pytest.fixture
def adapter(tmp_path) -> Path:
    write_adapter(tmp_path / "adapter", seed=1)
    return tmp_path / "adapter"


def change_config(adapter: Path, **changes) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_weights(adapter: Path, change) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def of_weights(change):
    """A change of the adapter's tensors, as a change of its folder."""
    return lambda adapter: change_weights(adapter, change)


def of_config(text):
    return lambda adapter: (adapter / "adapter_config.json").write_text(text)


def of_bytes(change):
    def changed(adapter):
        file = adapter / "adapter_model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_whole_adapter_passes(base, adapter, dtype):
    change_weights(adapter, lambda tensors: tensors.update({k: v.to(dtype) for k, v in tensors.items()}))
    check_adapter(adapter, base, rank_limit=8)


def test_subset_of_modules_passes(base, adapter):
    change_config(adapter, target_modules=["q_proj", "v_proj"])

    def keep_two(tensors):
        for name in [name for name in tensors if "q_proj" not in name and "v_proj" not in name]:
            del tensors[name]

    change_weights(adapter, keep_two)
    check_adapter(adapter, base, rank_limit=8)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *TABLES["wrong_config_is_refused_with_its_reason"],
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"target_modules": ["q_proj"] * 100_000}, "tensors of .*, which adapter_config.json leaves out"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        *(({"init_lora_weights": way}, f"init_lora_weights '{way}'") for way in ("olora", "corda", "loftq", "lora_ga")),
    ],
)
def test_wrong_config_is_refused_with_its_reason(base, adapter, changes, reason):
    change_config(adapter, **changes)
    with pytest.raises(AdapterError, match=reason):
        check_adapter(adapter, base, rank_limit=8)


@pytest.mark.fault("an adapter of plain LoRA is refused by the words of its config")
@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(q|k|v|o|gate|up|down)_proj"},
        {"target_modules": ["self_attn.q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]},
        {"target_modules": [f"model.layers.{n}.{p}" for n in range(2) for p in PATHS]},
        {"target_modules": [*LORA_MODULES, "lm_head"]},
        {"target_modules": [*LORA_MODULES, *LORA_MODULES]},
        {"exclude_modules": ["lm_head"]},
        {"exclude_modules": r"lm_head|visual\..*"},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
        {"layers_to_transform": [], "layers_pattern": None},
        *({"init_lora_weights": way} for way in ("orthogonal", "eva", "mica", False)),
    ],
)
def test_plain_lora_is_taken_whatever_words_say_so(base, adapter, changes):
    change_config(adapter, **changes)
    check_adapter(adapter, base, rank_limit=8)
    assert read_adapter(adapter)[1:] == (8, 16.0), "by the trainer, too"


def rename(tensors):
    tensors["base_model.model.layers.0.q_proj.lora_A.weight"] = tensors.pop(f"{Q_PROJ}.lora_A.weight")


def transpose(tensors):
    tensors[f"{Q_PROJ}.lora_B.weight"] = tensors[f"{Q_PROJ}.lora_B.weight"].T.contiguous()


def remove(tensors):
    del tensors[f"{Q_PROJ}.lora_B.weight"]


def integers(tensors):
    tensors[f"{Q_PROJ}.lora_A.weight"] = tensors[f"{Q_PROJ}.lora_A.weight"].to(torch.int32)


def poison(dtype, value):
    def change(tensors):
        tensors.update({k: v.to(dtype) for k, v in tensors.items()})
        tensors[f"{Q_PROJ}.lora_B.weight"][-1, -1] = value

    return change


def pickled(content):
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(1)}, buffer)
    return buffer.getvalue()


RENAMED = "1 unexpected tensors, first base_model.model.layers.0.q_proj.*expected names such as base_model.model.m"
NO_NUMBER = rf"{Q_PROJ}.lora_B.weight holds a NaN or an infinity"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (of_weights(rename), RENAMED),
        (of_weights(transpose), r"has shape \[8, 64\], must be \[64, 8\]"),
        (of_weights(remove), "1 tensors are missing"),
        (of_weights(integers), "is I32, must be one of"),
        *((of_weights(poison(d, float(v))), NO_NUMBER) for d in DTYPES for v in ("nan", "inf", "-inf")),
        (of_bytes(pickled), "not a whole safetensors file"),
        *((of_bytes(lambda content, keep=keep: content[:keep]), "not a whole safetensors") for keep in (0, 4, 100, -1)),
        *((of_config(text), r"adapter_config\.json") for text in ("", "[]", "{", "[" * 100_000)),
    ],
)
def test_wrong_files_are_refused_with_their_reason_and_never_unpickled(base, adapter, change, reason):
    change(adapter)
    with pytest.raises(AdapterError, match=reason):
        check_adapter(adapter, base, rank_limit=8)


def test_what_peft_writes_of_an_adapter_without_options_passes(base, adapter):
    config = LoraConfig(r=8, lora_alpha=8, target_modules=list(LORA_MODULES), task_type="CAUSAL_LM").to_dict()
    change_config(adapter, **config | {"peft_type": "LORA", "target_modules": sorted(config["target_modules"])})
    check_adapter(adapter, base, rank_limit=8)


@pytest.mark.fault("the base model cannot be published where the rank is below 8")
@pytest.mark.parametrize("rank_limit", [1, 4, 16])
def test_the_base_model_can_be_published_whatever_rank_a_node_takes(base, tmp_path, rank_limit):
    check_adapter(write_empty_adapter(tmp_path / "empty", str(tmp_path)), base, rank_limit)


def test_the_modules_are_those_of_a_base_model(base):
    assert base.lora_modules == LORA_MODULES


def test_largest_adapter_fits_its_bound(base, tmp_path):
    write_adapter(tmp_path / "largest", seed=0, rank=8)
    size = (tmp_path / "largest" / "adapter_model.safetensors").stat().st_size
    assert size < base.max_adapter_bytes(8) < size + (17 << 20)
