"""On each rank: a model that rank 0 reads for all, sharded, against the same one whole, on the same rollouts."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from loop_recipes.engine import sharding
from loop_recipes.engine.batching import BatchLayout, step_batches
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.general_decoder import general_decoder
from loop_recipes.engine.logprobs import TiledLogProbs
from loop_recipes.engine.model import load_base
from loop_recipes.engine.process_group import destroy_process_group, init_process_group
from loop_recipes.engine.sequence_parallel import RowPart
from loop_recipes.engine.sharding import full_tensors, place_model
from model_families.base_model import BaseModel
from support.families import section
from support.general_models import ours, placed, random_adapter, samples_of

BUDGET = 100


def general_differences(folders: list[Path], sharers: int = 1) -> dict[str, float]:
    """The largest difference of a gradient, in parts of the largest, by the name of the model's folder, where so many
    ranks share each row."""
    init_process_group(torch.device("cpu"), 60)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part, groups = RowPart.of_this_rank(sharers), (ranks // sharers, rank // sharers)
    found = {}
    for folder in folders:
        of_model = {"model": section(folder), "base_model": str(folder), "checkpointer": None}
        config = SimpleNamespace(**of_model, device="cpu", keep_attention=False)
        model, base = load_base(config, torch.float32)
        adapter = random_adapter(model, seed=1)
        decoder = attach_head(model, TiledLogProbs(16, 32))
        placing = (torch.device("cpu"), torch.float32)
        decoder = place_model(decoder, base, adapter, *placing, activation_checkpointing=True)
        for batch in step_batches(samples_of(), BatchLayout(BUDGET, True, *groups, part)):
            weighted = decoder(**batch.inputs()).logprobs * batch.old_logprobs
            weighted.sum().backward()
        gradients = full_tensors({name: p.grad for name, p in decoder.named_parameters() if p.grad is not None})
        with torch.device("meta"):
            alone = general_decoder(str(folder), BaseModel.read(folder), lora_rank=4, lora_alpha=8)
        with mock.patch.object(sharding, "single_process", return_value=True):
            whole = ours(placed(alone, folder), samples_of(), packed=True).gradients
        scale = max(float(gradient.abs().max()) for gradient in whole.values())
        worst = 0.0
        for name, gradient in gradients.items():
            inside = name.replace("_checkpoint_wrapped_module.", "")
            worst = max(worst, float((gradient * groups[0] - whole[alone.peft_name(inside)]).abs().max()))
        found[folder.name] = worst / scale
    dist.barrier()
    destroy_process_group()
    return found
