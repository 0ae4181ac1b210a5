"""Replay stored rollouts of a task of one's own under two checkouts, and compare what is learned byte for byte.

    python benchmarks/replay.py BASE [--cases loop sft]

BASE is a commit, or the folder of another checkout. A random model of 0.1M parameters, a file of functions and logs of
made-up episodes are written on the spot, always the same. This checkout and BASE then train on them with this
interpreter, on one CPU thread, each case for three iterations:

- ``loop``, ``critic``: `loop train` with LOOP, and with PPO's critic, from stored logs.
- ``sft``, ``dpo``: `loop sft` on the solved rollouts, and on pairs of rollouts.

Compared are all tensors of policies and checkpoints (adapters, the critic, moments of the optimizer, generators) and
all figures of ``metrics.jsonl`` that BASE writes, but those that the machine decides. A row per case says how many are
the same, or names the first that is not. Ends with 0 where all are the same, with 1 where one differs, is missing or a
case fails. It takes about a minute on two idle cores.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))
from checkouts import HERE, base_checkout, check_imported, hide_installed_checkout, run_checkout

ITERATIONS, TASKS, ROLLOUTS = 3, 4, 4
WIDTH, LAYERS, HEADS, KV_HEADS, FEED_FORWARD = 64, 2, 4, 2, 128
MACHINE_FIGURES = re.compile("seconds|tokens_per_second|model_flops_utilization|peak_memory_gib")

TRAIN = ["rollout_node.launch=False", "collection.tasks_per_iteration=4", "collection.rollouts_per_task=4"]
TRAIN += ["collection.min_rollouts_per_task=2", "update.micro_batch_tokens=200", "update.minibatch_rollouts=6"]
TRAIN += ["update.epochs=2", "optimizer.lr=3e-3"]  # so that ratios are clipped
SFT = ["update.micro_batch_tokens=200", "update.minibatch_rollouts=3"]
CASES = {
    "loop": ("loop_appworld", TRAIN),
    "critic": ("loop_appworld", [*TRAIN, "algorithm=ppo_critic", "credit.critic.warmup_iterations=1"]),
    "sft": ("sft_appworld", SFT),
    "dpo": ("sft_appworld", [*SFT, "algorithm=dpo"]),
}
"""A case -> its recipe and the words of its command line, beside those that name the files."""
BEFORE_CREDIT = {"credit.critic.warmup_iterations=1": "critic.warmup_iterations=1"}
"""Words as a BASE takes them that has no section ``credit`` yet."""

MODULE = '''"""A task of one's own, whose stored rollouts are replayed."""

from agent_environments.tools import reward, tool


@tool(terminal=True)
def answer(value: float) -> float:
    """Give the final answer."""
    return value


@reward
def correct(answer: str, target: float) -> bool:
    return answer != "" and float(answer) == target


TASKS = [{"id": f"task_{n}", "question": f"What is {n} times 37?", "target": 37.0 * n} for n in range(1, 7)]
'''
# The inputs.


def write_inputs(folder: Path) -> None:
    """Write model, module, config and logs, the same ones each time."""
    (folder / "task.py").write_text(MODULE)
    write_model(folder / "model")
    config = {
        "machine": "cpu",
        "run_name": "replayed",
        "max_iterations": ITERATIONS,
        "model": {"path": str(folder / "model")},
        "node": {"environment": {"name": "tools", "module": str(folder / "task.py")}},
    }
    (folder / "train.yaml").write_text(json.dumps(config))  # which is YAML
    logs = folder / "stored" / "collections"
    logs.mkdir(parents=True)
    for iteration in range(1, ITERATIONS + 1):
        lines = [line for episode in stored_episodes(f"stored-i{iteration:04d}", iteration) for line in episode]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (logs / f"stored-i{iteration:04d}.jsonl").write_text(text)


def write_model(folder: Path) -> None:
    """Write a random Qwen2 of fp32, with a tokenizer of single bytes, as a Hugging Face folder."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir()
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    chat = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    chat += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "chat_template": chat}))
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": len(vocabulary),
        "hidden_size": WIDTH,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(vocabulary), WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    head = WIDTH // HEADS
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{name}{norm}.weight"] = (WIDTH,)
        for projection, heads in {"q_proj": HEADS, "k_proj": KV_HEADS, "v_proj": KV_HEADS}.items():
            shapes[f"{name}self_attn.{projection}.weight"] = (heads * head, WIDTH)
            shapes[f"{name}self_attn.{projection}.bias"] = (heads * head,)
        shapes[f"{name}self_attn.o_proj.weight"] = (WIDTH, WIDTH)
        for projection in ("gate_proj", "up_proj"):
            shapes[f"{name}mlp.{projection}.weight"] = (FEED_FORWARD, WIDTH)
        shapes[f"{name}mlp.down_proj.weight"] = (WIDTH, FEED_FORWARD)
    generator = torch.Generator().manual_seed(0)
    noise = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    weights = {name: tensor + (1.0 if "norm." in name else 0.0) for name, tensor in noise.items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def stored_episodes(collection: str, iteration: int) -> Iterator[list[dict[str, Any]]]:
    """Yield episodes of a collection, each as the records of its sequences.

    Among them are a task without signal, episodes of two sequences, turns with rewards of their own, an episode that a
    limit ended, and prompts that the rollouts of a task share.
    """
    for task in range(1, TASKS + 1):
        prompt = [random.Random(task).randrange(3, 200) for _ in range(20 + task)]
        for index in range(ROLLOUTS):
            draw = random.Random((iteration * 10 + task) * 10 + index)
            reward = 1.0 if task == 1 else ((index + task + iteration) % 3) / 2
            segments = 2 if index == 2 else 1
            identity = f"{collection}/task_{task}/{index}.0"
            shared = {
                "collection_id": collection,
                "task_id": f"task_{task}",
                "index": index,
                "attempt": 0,
                "seed": draw.randrange(2**31),
                "dataset": "stored",
                "requirements": [],
                "reward": reward,
                "success": reward == 1.0,
                "end_reason": "turn_limit" if index == 3 else "completed",
                "temperature": 1.0,
                "started_at": 0.0,
                "seconds": 1.0,
                "ungradable": None,
                "branch_of": None,
                "schema": 2,
                "extra": {},
                "episode_id": identity,
                "segments": segments,
                "broke": None,
                "tools": [],
            }
            yield [
                shared
                | {"rollout_id": identity if segment == 0 else f"{identity}.s{segment}", "segment": segment}
                | sequence(draw, prompt, iteration - 1)
                for segment in range(segments)
            ]


def sequence(draw: random.Random, prompt: list[int], version: int) -> dict[str, Any]:
    """Draw tokens, mask, log-probs, turns and messages: two or three turns of random ids after the prompt."""
    token_ids, mask, logprobs, turns = [*prompt], [False] * len(prompt), [0.0] * len(prompt), []
    messages = [{"role": "user", "content": "What is 2 times 37?"}]
    for number in range(draw.randint(2, 3)):
        start, sampled, observed = len(token_ids), draw.randint(4, 14), draw.randint(3, 9)
        token_ids += [draw.randrange(3, 200) for _ in range(sampled + observed)]
        mask += [True] * sampled + [False] * observed
        logprobs += [-draw.uniform(3.0, 7.0) for _ in range(sampled)] + [0.0] * observed
        turn = {
            "start": start,
            "end": start + sampled,
            "policy_version": version,
            "finish_reason": "stop",
            "server": "server",
            "sampling_seconds": 0.1,
            "environment_seconds": 0.1,
            "message": len(messages),
            "failed": number == 1,
            "cached_tokens": 0,
            "thinking_tokens": 0,
            "cut_in_thinking": False,
            "reward": None,
            "summary": False,
        }
        turns.append(turn)
        messages += [{"role": "assistant", "content": "74"}, {"role": "user", "content": "Go on."}]
    return {"token_ids": token_ids, "mask": mask, "sampler_logprobs": logprobs, "turns": turns, "messages": messages}


# A checkout's own process.


def replay(checkout: Path, inputs: Path, outputs: Path, cases: list[str]) -> None:
    """Run the cases with the code of ``checkout``; called in a process whose path begins with it."""
    hide_installed_checkout()
    from loop_recipes.config.files import compose

    for case in cases:
        recipe, words = CASES[case]
        if not (checkout / "recipes/loop_recipes/algorithm/credit.py").is_file():
            words = [BEFORE_CREDIT.get(word, word) for word in words]
        replayed = {"loop_appworld": f"rollout_node.replay={inputs / 'stored/collections'}"}
        files = [f"output_dir={outputs / case}", replayed.get(recipe, f"rollouts.logs=[{inputs / 'stored'}]")]
        members = vars(importlib.import_module(recipe)).values()
        [recipe_class] = [member for member in members if isinstance(member, type) and member.__module__ == recipe]
        trained = recipe_class(compose(str(inputs / "train.yaml"), [*words, *files], recipe))
        try:
            trained.setup()
            trained.train()
        finally:
            trained.cleanup()
    check_imported(checkout, [CASES[case][0] for case in cases])


# The comparison.


def learned(run: Path) -> dict[str, bytes]:
    """Read all that a run learned, in its order: name -> bytes, of tensors with their type and shape."""
    import torch
    from safetensors import safe_open

    values: dict[str, bytes] = {}
    # By the last number of the folder, which is the iteration or the version.
    files = sorted(run.rglob("*.safetensors"), key=lambda file: (*re.findall(r"\d+", str(file.parent))[-1:], str(file)))
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                tensor = tensors.get_tensor(name).contiguous()
                kind = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
                values[f"{file.relative_to(run)}: {name}"] = kind + tensor.flatten().view(torch.uint8).numpy().tobytes()
    for number, line in enumerate((run / "metrics.jsonl").read_text().splitlines(), 1):
        figures = {f"metrics {number}: {name}": value for name, value in json.loads(line).items()}
        values |= {name: repr(v).encode() for name, v in figures.items() if not MACHINE_FIGURES.search(name)}
    return values


def first_difference(before: dict[str, bytes], now: dict[str, bytes]) -> str | None:
    """Return the first value that differs or is on one side only, in one line; None where all are the same. A figure of
    ``metrics.jsonl`` that BASE does not write yet is left out."""
    for name in [*now, *(name for name in before if name not in now)]:
        if name not in before and name.startswith("metrics "):
            continue
        if name not in before or name not in now:
            return f"{name} is only in {'BASE' if name in before else 'this checkout'}"
        if before[name] != now[name]:
            return f"{name} differs"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE", help="a commit, or the folder of another checkout")
    parser.add_argument("--cases", choices=list(CASES), nargs="+", default=list(CASES))
    for name in ("checkout", "inputs", "outputs"):  # of a checkout's own process
        parser.add_argument(f"--{name}", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.checkout:
        replay(args.checkout, args.inputs, args.outputs, args.cases)
        return 0
    with tempfile.TemporaryDirectory(prefix="replay-") as temporary:
        folder = Path(temporary)
        (folder / "inputs").mkdir()
        write_inputs(folder / "inputs")
        with base_checkout(args.base, folder / "checkout") as base:
            runs = {folder / "base": base, folder / "now": HERE}
            with ThreadPoolExecutor() as both:
                inputs = folder / "inputs"

                def replayed(run: tuple[Path, Path]) -> str | None:
                    outputs, checkout = run
                    outputs.mkdir()
                    words = ["--inputs", str(inputs), "--outputs", str(outputs), "--cases", *args.cases]
                    return run_checkout(checkout, __file__, words, inputs, outputs.with_suffix(".log"))

                ended = both.map(replayed, runs.items())
            failed = {outputs.name: why for outputs, why in zip(runs, ended, strict=True)}
        return compared(folder, failed, args.cases)


def compared(folder: Path, failed: dict[str, str | None], cases: list[str]) -> int:
    """Print a row per case; returns the exit status."""
    for name, why in failed.items():
        if why is not None:
            print(f"{name}: {why}")
            return 1
    print(f"{'case':<8}{'values':>8}  compared with BASE")
    status = 0
    for case in cases:
        before, now = (learned(folder / name / case) for name in ("base", "now"))
        differs = first_difference(before, now)
        print(f"{case:<8}{len(now):>8}  {differs or 'the same bytes'}")
        status |= differs is not None
    return status


if __name__ == "__main__":
    sys.exit(main())
