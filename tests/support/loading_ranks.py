"""On each rank: it loads its part of a model from a file, and all of it is gathered again."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from loop_recipes.engine.batching import BatchLayout, step_batches
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.frozen_weights import FrozenWeights
from loop_recipes.engine.logprobs import TiledLogProbs
from loop_recipes.engine.model import meta_model, new_adapter
from loop_recipes.engine.sharding import full_tensors, like_parameter, local_part, place_model
from support.learner_cases import make_samples

MODEL = {
    "_component_": "torchtune.models.qwen2.lora_qwen2",
    "lora_attn_modules": ["q_proj", "v_proj"],
    "apply_lora_to_mlp": True,
    "vocab_size": 262_147,  # odd, so that no number of ranks divides it
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "intermediate_dim": 50,
    "max_seq_len": 64,
    "lora_rank": 3,
    "lora_alpha": 8,
}


def resident(file: Path) -> int:
    """Bytes of a mapped file that this process has read."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            ours = line.endswith(str(file))
        elif ours and first == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


def leave_and_come(dtype: torch.dtype) -> dict[str, Any]:
    """What a sharded model computes, and the bytes that its frozen weights take: before they leave, while they are on
    the host, and when they are back."""
    dist.init_process_group("gloo")
    model = meta_model(MODEL | {"vocab_size": 2053}, dtype)
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if ".lora_" not in name}
    base = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    decoder = attach_head(model, TiledLogProbs())
    model = place_model(decoder, base, new_adapter(model, seed=1), torch.device("cpu"), dtype)
    (batch,) = step_batches(make_samples([20, 18]), BatchLayout(80, packed=True))
    frozen = FrozenWeights(model)
    found: dict[str, Any] = {"computed": [], "bytes": []}
    for turn in range(3):
        if turn:
            frozen.to_device()
        output = model(**batch.inputs()).logprobs
        output.sum().backward()
        with torch.no_grad():  # leaves the last layers gathered
            again = model(**batch.inputs()).logprobs
        found["computed"].append([output.sum().item(), again.sum().item()])
        found["bytes"].append(sum(weight.untyped_storage().nbytes() for _, weight in frozen._weights()))
        frozen.to_host()
        found["bytes"].append(sum(weight.untyped_storage().nbytes() for _, weight in frozen._weights()))
    dist.destroy_process_group()
    return found


def load_and_gather(file: Path) -> dict[str, Any]:
    """Whether the tensors are those of the file, the share of it that a rank has read at most, and the collectives that
    gathering took."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = meta_model(MODEL, torch.float32)
    if rank == 0:
        generator = torch.Generator().manual_seed(0)
        names = {name: tensor.shape for name, tensor in model.state_dict().items() if ".lora_" not in name}
        save_file({name: torch.randn(shape, generator=generator) for name, shape in names.items()}, file)
    dist.barrier()
    with safe_open(file, "pt") as opened:
        base = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    adapter = new_adapter(model, seed=1)
    model = place_model(attach_head(model, TiledLogProbs()), base, adapter, torch.device("cpu"), torch.float32)
    parameters = dict(model.named_parameters())
    with mock.patch.object(dist, "all_gather_single", wraps=dist.all_gather_single) as gather:
        whole = full_tensors(parameters)
    most = torch.tensor(resident(file))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    again = (like_parameter(whole[name], parameter) for name, parameter in parameters.items())
    found = {
        "equal": whole.keys() == (base | adapter).keys()
        and all(torch.equal(whole[name], tensor) for name, tensor in (base | adapter).items()),
        "placed_again": all(
            torch.equal(local_part(one), local_part(other.detach()))
            for one, other in zip(again, parameters.values(), strict=True)
        ),
        "read": most.item() / file.stat().st_size,
        "collectives": gather.call_count,
    }
    dist.barrier()
    dist.destroy_process_group()
    return found
