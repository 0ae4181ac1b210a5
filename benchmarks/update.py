"""Measure a policy update on the same rollouts: ours against a straightforward transformers + peft loop.

    python benchmarks/update.py [--vocab 4096 --width 128 --layers 4 --rollouts 48] [--json results.json]

Both start from the same Qwen2-architecture weights and LoRA adapter (rank 16 on all projections, float32), recompute
the old log-probs without gradient, then take one epoch of clipped steps (AdamW) over minibatches of 16 rollouts.

- ``ours``: torchtune decoder, packed micro-batches, only rows that predict sampled tokens reach the tiled head.
- ``ours_one_by_one``: the same with one rollout a row, as ``peft_one_by_one`` has them.
- ``ours_padded``: the same with padded micro-batches.
- ``ours_unfolded``: ``ours`` with torchtune's own LoRA layers, which add products in passes of their own.
- ``ours_general``: transformers' modules in place of torchtune's, as models of other architectures are trained.
- ``peft_one_by_one``: transformers + peft, one rollout at a time, all logits.
- ``peft_logits_to_keep``: the same, with logits of the rows alone that predict sampled tokens.
- ``trl``: ``GRPOTrainer``'s own log-probs and loss, padded batches of eight. Measured if the variable ``TRL_PYTHON``
  names an interpreter that has TRL 1.16, with its own transformers and peft, beside this project.

The rollouts are random tokens in the shape of agent episodes: a prompt shared within a task, then turns of sampled
tokens with longer observations between them. ``tokens_per_s`` counts all tokens of the rollouts once, against the wall
clock; ``tokens_per_cpu_s`` against processor time. ``peak_mib`` is how far memory rose above model and rollouts. Every
case runs in a process of its own; the losses and gradient norms of all steps must agree, and the largest relative
difference from the last case is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from peak_memory import PeakMemory
from torch import Tensor, nn
from torchtune.models.qwen2 import lora_qwen2
from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune
from torchtune.modules.peft import LoRALinear
from transformers import Qwen2Config, Qwen2ForCausalLM

from loop_recipes.algorithm.losses import ClippedPolicyLoss
from loop_recipes.engine.batching import BatchLayout, micro_batches, step_batches
from loop_recipes.engine.cuda_layers import FoldedLoRALinear
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.general_decoder import general_decoder, read_weights
from loop_recipes.engine.logprobs import TiledLogProbs
from loop_recipes.engine.samples import CreditedSample, Sample, ScoredSample, scored
from loop_recipes.engine.sharding import place_model
from model_families.base_model import BaseModel
from model_families.weights.weight_names import peft_name

GROUP, MINIBATCH, EPS, RANK, ALPHA, LR = 6, 16, 0.1, 16, 32, 1e-3
PROMPT, TRL_ROWS = 300, 8


def make_rollouts(vocab: int, rollouts: int) -> list[CreditedSample]:
    """Make episodes of about 1,000 tokens in groups of six, one quarter to one third of them sampled."""
    generator = torch.Generator().manual_seed(0)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    samples = []
    for number in range(rollouts):
        if number % GROUP == 0:
            prompt = torch.randint(0, vocab, (PROMPT,), generator=generator)
        pieces, turn_ids = [prompt], [torch.full((PROMPT,), -1)]
        for turn in range(integer(3, 8)):
            for length, label in ((integer(25, 90), turn), (integer(50, 250), -1)):
                pieces.append(torch.randint(0, vocab, (length,), generator=generator))
                turn_ids.append(torch.full((length,), label))
        turns = torch.cat(turn_ids)
        sampled = int((turns >= 0).sum())
        samples.append(
            CreditedSample(
                rollout_id=f"rollout-{number:02d}",
                task_id=f"task-{number // GROUP}",
                token_ids=torch.cat(pieces),
                mask=turns >= 0,
                turn_ids=turns,
                sampler_logprobs=torch.zeros(sampled),
                policy_versions=torch.zeros(sampled, dtype=torch.long),
                reward=0.0,
                advantage=float(torch.randn((), generator=generator)),
                episode_tokens=sampled,
                episode_turns=int(turns.max()) + 1,
            )
        )
    return samples


def hf_model(args: argparse.Namespace) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=args.vocab,
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        use_cache=False,
    )
    return Qwen2ForCausalLM(config)


def adapter(shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Return LoRA weights by torchtune's names; B is not zero, so that A has a gradient too."""
    generator = torch.Generator().manual_seed(1)
    return {name: 0.02 * torch.randn(shapes[name], generator=generator) for name in sorted(shapes)}


def tune_model(args: argparse.Namespace) -> nn.Module:
    """Build the torchtune twin of :func:`hf_model` with the adapter in it and the tiled head on it."""
    model = lora_qwen2(
        ["q_proj", "k_proj", "v_proj", "output_proj"],
        apply_lora_to_mlp=True,
        vocab_size=args.vocab,
        num_layers=args.layers,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=args.width,
        intermediate_dim=3 * args.width,
        max_seq_len=4096,
        norm_eps=1e-6,
        rope_base=1e6,
        tie_word_embeddings=True,
        lora_rank=RANK,
        lora_alpha=ALPHA,
    )
    base = qwen2_hf_to_tune(
        hf_model(args).state_dict(), num_heads=4, num_kv_heads=2, dim=args.width, tie_word_embeddings=True
    )
    lora = adapter({name: p.shape for name, p in model.named_parameters() if ".lora_" in name})
    model.load_state_dict({**base, **lora})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return attach_head(model, TiledLogProbs())


def peft_model(args: argparse.Namespace) -> nn.Module:
    """Build :func:`hf_model` with the same adapter through peft."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(hf_model(args), LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=projections))
    shapes = {name: p.shape for name, p in tune_model(args).named_parameters() if ".lora_" in name}
    weights = {peft_name(name): value for name, value in adapter(shapes).items()}
    set_peft_model_state_dict(model, weights)
    assert get_peft_model_state_dict(model, save_embedding_layers=False).keys() == weights.keys()
    return model


def unfolded(model: nn.Module) -> nn.Module:
    """Return the model with the LoRA layers that it was built with."""
    for module in model.modules():
        if isinstance(module, FoldedLoRALinear):
            module.__class__ = LoRALinear
    return model


def general_model(args: argparse.Namespace) -> nn.Module:
    """Build :func:`tune_model` by transformers' modules."""
    shapes = {name: p.shape for name, p in tune_model(args).named_parameters() if ".lora_" in name}
    lora = {peft_name(name): tensor for name, tensor in adapter(shapes).items()}
    with tempfile.TemporaryDirectory() as folder:
        hf_model(args).save_pretrained(folder)
        base = BaseModel.read(folder, general=True)
        with torch.device("meta"):
            model = general_decoder(folder, base, RANK, ALPHA)
        weights, buffers = read_weights(folder, base, torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    own = {name: lora[model.peft_name(name)] for name, p in model.named_parameters() if p.requires_grad}
    attach_head(model, TiledLogProbs())
    return place_model(model, weights | buffers, own, torch.device("cpu"), torch.float32)


def ours(
    args: argparse.Namespace, packed: bool, model: nn.Module | None = None, tokens: int | None = None
) -> tuple[nn.Module, Callable, Callable]:
    model, loss = model or tune_model(args), ClippedPolicyLoss(eps=EPS)
    layout = BatchLayout(tokens or args.micro_batch_tokens, packed)

    def old_logprobs(samples: list[CreditedSample]) -> list[ScoredSample]:
        with torch.no_grad():
            old: dict[str, Tensor] = {}
            for batch in micro_batches(samples, layout):
                old |= batch.split(model(**batch.inputs()).logprobs)
        return [scored(sample, old[sample.rollout_id]) for sample in samples]

    def gradient(samples: list[ScoredSample]) -> float:
        total = 0.0
        for batch in step_batches(samples, layout):
            value = loss(model(**batch.inputs()).logprobs, batch).per_rollout_loss.sum() / len(samples)
            value.backward()
            total += value.item()
        return total

    return model, old_logprobs, gradient


def one_by_one(args: argparse.Namespace, keep_all: bool) -> tuple[nn.Module, Callable, Callable]:
    model = peft_model(args)

    def logprobs(sample: Sample) -> Tensor:
        sampled = sample.mask[1:].nonzero().squeeze(1)
        rows = torch.arange(sample.tokens - 1) if keep_all else sampled
        logits = model(input_ids=sample.token_ids[None], logits_to_keep=rows).logits[0].float()
        values = logits.log_softmax(-1).gather(1, sample.token_ids[1:][rows, None]).squeeze(1)
        return values[sampled] if keep_all else values

    def old_logprobs(samples: list[CreditedSample]) -> list[ScoredSample]:
        with torch.no_grad():
            return [scored(sample, logprobs(sample)) for sample in samples]

    def gradient(samples: list[ScoredSample]) -> float:
        total = 0.0
        for sample in samples:
            ratio = (logprobs(sample) - sample.old_logprobs).exp()
            clipped = ratio.clamp(1 - EPS, 1 + EPS)
            value = -torch.minimum(ratio * sample.advantage, clipped * sample.advantage).mean() / len(samples)
            value.backward()
            total += value.item()
        return total

    return model, old_logprobs, gradient


def trl(args: argparse.Namespace) -> tuple[nn.Module, Callable, Callable]:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = Tokenizer(models.WordLevel({"pad": 0, "eos": 1}, unk_token="pad"))
    trainer = GRPOTrainer(
        peft_model(args),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(prefix="trl-"),
            per_device_train_batch_size=TRL_ROWS,
            gradient_accumulation_steps=MINIBATCH // TRL_ROWS,
            loss_type="grpo",
            epsilon=EPS,
            beta=0.0,
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            report_to=[],
        ),
        train_dataset=Dataset.from_list([{"prompt": "eos"}] * MINIBATCH),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="pad", eos_token="eos"),
    )
    trainer.current_gradient_accumulation_steps = MINIBATCH // TRL_ROWS

    def inputs(samples: Sequence[CreditedSample]) -> dict[str, Tensor]:
        """Return rollouts with observations in TRL's form: a prompt, and all that follows it as completion."""
        rows = {
            "completion_ids": [sample.token_ids[PROMPT:] for sample in samples],
            "completion_mask": [torch.ones(sample.tokens - PROMPT, dtype=torch.long) for sample in samples],
            "tool_mask": [sample.mask[PROMPT:].long() for sample in samples],
        }
        padded = {name: nn.utils.rnn.pad_sequence(row, batch_first=True) for name, row in rows.items()}
        prompts = torch.stack([sample.token_ids[:PROMPT] for sample in samples])
        advantages = torch.tensor([sample.advantage for sample in samples])
        return padded | {"prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "advantages": advantages}

    def old_logprobs(samples: list[CreditedSample]) -> list[ScoredSample]:
        every = []
        for start in range(0, len(samples), TRL_ROWS):
            batch = samples[start : start + TRL_ROWS]
            fields = inputs(batch)
            ids = torch.cat([fields["prompt_ids"], fields["completion_ids"]], dim=1)
            attended = torch.cat([fields["prompt_mask"], fields["completion_mask"]], dim=1)
            with torch.no_grad():
                logps, *_ = trainer._get_per_token_logps_and_entropies(
                    trainer.model, ids, attended, fields["completion_ids"].shape[1]
                )
            every += [scored(s, row[: s.tokens - PROMPT][s.mask[PROMPT:]]) for s, row in zip(batch, logps, strict=True)]
        return every

    def gradient(samples: list[ScoredSample]) -> float:
        total = 0.0
        for start in range(0, len(samples), TRL_ROWS):
            batch = samples[start : start + TRL_ROWS]
            fields = inputs(batch)
            old = torch.zeros(fields["completion_ids"].shape)
            old[fields["tool_mask"].bool()] = torch.cat([sample.old_logprobs for sample in batch])
            value = trainer._compute_loss(trainer.model, fields | {"old_per_token_logps": old})
            value.backward()
            total += value.item()
        return total

    return trainer.model, old_logprobs, gradient


CASES: dict[str, Callable[[argparse.Namespace], tuple[nn.Module, Callable, Callable]]] = {
    "ours": lambda args: ours(args, packed=True),
    "ours_one_by_one": lambda args: ours(args, packed=True, tokens=1),
    "ours_padded": lambda args: ours(args, packed=False),
    "ours_unfolded": lambda args: ours(args, True, unfolded(tune_model(args))),
    "ours_general": lambda args: ours(args, True, general_model(args)),
    "peft_logits_to_keep": lambda args: one_by_one(args, keep_all=False),
    "peft_one_by_one": lambda args: one_by_one(args, keep_all=True),
    "trl": trl,
}


def measure(args: argparse.Namespace) -> dict[str, float | list[float]]:
    """Measure a case in this process: a small warm-up, then the update."""
    samples = make_rollouts(args.vocab, args.rollouts)
    model, old_logprobs, gradient = CASES[args.case](args)
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradient(old_logprobs(samples[:2]))
    optimizer = torch.optim.AdamW(parameters, lr=LR)
    optimizer.zero_grad()

    peak, losses, norms = PeakMemory(torch.device("cpu")), [], []
    started, cpu_started = time.perf_counter(), time.process_time()
    samples = old_logprobs(samples)
    order = torch.randperm(args.rollouts, generator=torch.Generator().manual_seed(2)).tolist()
    for start in range(0, args.rollouts, MINIBATCH):
        losses.append(gradient([samples[i] for i in order[start : start + MINIBATCH]]))
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    tokens = sum(sample.tokens for sample in samples)
    return {
        "tokens_per_s": tokens / (time.perf_counter() - started),
        "tokens_per_cpu_s": tokens / (time.process_time() - cpu_started),
        "peak_mib": peak.rise_mib(),
        "steps": [*losses, *norms],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rollouts", type=int, default=48)
    parser.add_argument("--micro-batch-tokens", type=int, default=1024, help="of a row of ours; a rollout is never cut")
    parser.add_argument("--case", choices=list(CASES), help="measure this one in this process and print JSON")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="these alone")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args)))
        return

    samples = make_rollouts(args.vocab, args.rollouts)
    tokens, sampled = sum(s.tokens for s in samples), sum(len(s.sampler_logprobs) for s in samples)
    print(
        f"{args.rollouts} rollouts, {tokens:,} tokens of which {sampled:,} sampled; v={args.vocab:,} d={args.width} ",
        end="",
    )
    print(f"{args.layers} layers, float32, torch {torch.__version__}, {torch.get_num_threads()} thread(s)", end="")
    print(f"; rows of ours up to {args.micro_batch_tokens:,} tokens, one_by_one of one rollout")
    print(f"{'case':<20}{'tokens/s':>10}{'tokens/CPU s':>14}{'peak MiB':>10}")
    rows, results = [], {}
    for case in args.cases:
        interpreter = os.environ.get("TRL_PYTHON") if case == "trl" else sys.executable
        if interpreter is None:
            continue
        command = [interpreter, __file__, "--case", case]
        for name in ("vocab", "width", "layers", "rollouts", "micro_batch_tokens"):
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=3600, check=True)
        result = results[case] = json.loads(done.stdout.strip().splitlines()[-1])
        print(
            f"{case:<20}{result['tokens_per_s']:>10.0f}{result['tokens_per_cpu_s']:>14.0f}{result['peak_mib']:>10.0f}",
            flush=True,
        )
        size = f"v{args.vocab}_d{args.width}_l{args.layers}"
        for metric, unit in (("tokens_per_s", "tokens/s"), ("tokens_per_cpu_s", "tokens/s"), ("peak_mib", "MiB")):
            rows.append({"case": f"{case} {size}", "metric": metric, "value": round(result[metric], 2), "unit": unit})
    reference = [*results.values()][-1]["steps"]
    worst = max(abs(x / y - 1) for r in results.values() for x, y in zip(r["steps"], reference, strict=True))
    print(f"losses and gradient norms of all steps agree to {worst:.1e}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
