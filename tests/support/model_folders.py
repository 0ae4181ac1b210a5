"""Small random models in folders as other tools write them, and as users leave them behind.

A case makes a folder. It is taken, or it is refused in the words of ``model_folders.yaml``. The templates are told in
our own words: what they write is theirs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from support.chat_templates import FORMS, Form
from support.chat_tokenizers import LLAMA3_SPECIAL, template_text, write_qwen3, write_small
from support.families import shapes_of, small, write_config, write_model
from support.random_policy import CHATML
from support.texts import texts_beside

ONE_FILE = "model.safetensors"
CHATML_WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_CALLS = ["<tool_call>", "</tool_call>"]
WITH_SYSTEM, QWEN3, LLAMA3_1, LLAMA3_0, ALPACA, INSTRUCTION, TRIMMED, TOOLS_OF_ITS_OWN = map(
    template_text,
    ("qwen2_5", "qwen3", "llama3_1", "llama3_0", "alpaca", "instruction", "trimmed", "tools_of_its_own"),
)


@dataclass(frozen=True)
class Case:
    """A folder as a tool writes it: ``make`` fills it, ``refused`` is a regular expression.

    ``silent``: what is wrong with it was trained without a word.
    """

    name: str
    make: Callable[[Path], object]
    refused: str | None = None
    silent: bool = False


def qwen2(folder: Path, template: str | None = CHATML, calls: bool = True, **config: Any) -> Path:
    """A Qwen2 in float32 with ChatML's words, in one file of safetensors."""
    write_small(folder, "Qwen2ForCausalLM", CHATML_WORDS, QWEN_CALLS if calls else [])
    return _whole(folder, small("Qwen2.5-1.5B", **config), template, eos_token="<|im_end|>")


def qwen3(folder: Path, template: str | None = QWEN3, **config: Any) -> Path:
    """A Qwen3 with the first words of its own vocabulary."""
    write_qwen3(folder, words=500)
    return _whole(folder, small("Qwen3-4B", **config), template, eos_token="<|im_end|>")


def llama3(folder: Path, template: str | None = LLAMA3_1, **config: Any) -> Path:
    """A Llama 3 with scaled positions."""
    write_small(folder, "LlamaForCausalLM", LLAMA3_SPECIAL)
    words = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    return _whole(folder, small("Llama-3.1-8B", **config), template, **words)


def plain(folder: Path, name: str, template: str | None, special: list[str], **config: Any) -> Path:
    """A model of another published one's proportions whose tokenizer has these words."""
    settings = small(name, **config)
    write_small(folder, settings["architectures"][0], special)
    return _whole(folder, settings, template, bos_token=special[0], eos_token=special[-1])


def _whole(folder: Path, config: dict[str, Any], template: str | None, **tokenizer: Any) -> Path:
    """The other files beside tokenizer.json: its configuration, config.json and random weights."""
    words = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    chat = {} if template is None else {"chat_template": template}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer, **chat}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    write_config(folder, {"vocab_size": words} | config | ({} if config["vocab_size"] != 97 else {"vocab_size": words}))
    save_file(weights_of(folder), folder / ONE_FILE, metadata={"format": "pt"})
    return folder


def weights_of(folder: Path, seed: int = 0) -> dict[str, Tensor]:
    """Random weights of the model that config.json describes."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes_of(json.loads((folder / "config.json").read_text())).items():
        drawn = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.3 * drawn if name.endswith("norm.weight") else drawn * 1.5 * shape[-1] ** -0.5
    return tensors


def reconfigured(folder: Path, *removed: str, **changes: Any) -> None:
    """Change keys of config.json."""
    config = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in removed}
    (folder / "config.json").write_text(json.dumps(kept | changes))


def stored(folder: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> None:
    """Write the weights anew, as ``change`` makes them."""
    tensors = load_file(folder / ONE_FILE)
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, folder / ONE_FILE)


def prefixed(prefix: str) -> Callable[[Path], None]:
    """Give every name a beginning."""
    return lambda folder: stored(qwen2(folder), lambda tensors: {prefix + name: t for name, t in tensors.items()})


def in_parts(folder: Path, count: int = 2, suffix: str = "safetensors") -> None:
    """Divide the one file as transformers does."""
    tensors = load_file(folder / ONE_FILE)
    (folder / ONE_FILE).unlink()
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    index = {}
    for number in range(count):
        name = f"{stem}-{number + 1:05}-of-{count:05}.{suffix}"
        part = {key: tensors[key] for key in sorted(tensors)[number::count]}
        save_file(part, folder / name) if suffix == "safetensors" else torch.save(part, folder / name)
        index |= dict.fromkeys(part, name)
    file = folder / f"{stem}.{suffix}.index.json"
    file.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": index}))


def as_bin(folder: Path) -> None:
    """Store the weights in a pickle, as transformers did before safetensors."""
    tensors = load_file(folder / ONE_FILE)
    (folder / ONE_FILE).unlink()
    torch.save(tensors, folder / "pytorch_model.bin")


def in_a_hubs_cache(folder: Path) -> None:
    """Snapshots of links to blobs, as huggingface_hub keeps them."""
    snapshot, blobs = qwen2(folder), folder / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(file for file in snapshot.iterdir() if file.is_file())):
        file.rename(blobs / f"{number:040x}")
        file.symlink_to(Path("blobs") / f"{number:040x}")


def as_transformers_5(folder: Path) -> None:
    qwen2(folder)
    reconfigured(folder, "rope_theta", rope_parameters={"rope_theta": 1e6, "rope_type": "default"}, dtype="float32")


def by_transformers_itself(folder: Path) -> None:
    qwen2(folder)
    write_model(folder, json.loads((folder / "config.json").read_text()))


def with_files(*names: str) -> Callable[[Path], None]:
    """Beside the model lie files that are none of it."""

    def make(folder: Path) -> None:
        qwen2(folder)
        for name in names:
            torch.save({"state": {0: torch.zeros(3)}}, folder / name)

    return make


def with_adapter(folder: Path) -> None:
    tensors = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(1, 96)}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))


def by_torchtune(folder: Path) -> None:
    in_parts(qwen2(folder), 1)
    with_adapter(folder)


def beside(name: str, tensors: Callable[[Path], Mapping[str, Tensor]]) -> Callable[[Path], None]:
    """Another file of safetensors beside the model's."""
    return lambda folder: save_file(dict(tensors(qwen2(folder))), folder / name)


def head_of_values(_: Path) -> dict[str, Tensor]:
    return {"v_head.summary.weight": torch.zeros(1, 96), "v_head.summary.bias": torch.zeros(1)}


def template_file(folder: Path) -> None:
    """transformers 5 writes the template beside the tokenizer; an older one is left in its configuration."""
    (qwen2(folder, template=ALPACA) / "chat_template.jinja").write_text(CHATML)


def additional_templates(folder: Path) -> None:
    more = template_file(folder) or folder / "additional_chat_templates"
    more.mkdir()
    (folder / "chat_template.jinja").write_text(ALPACA)
    (more / "default.jinja").write_text(CHATML)
    (more / "rag.jinja").write_text("{{ documents }}")


def named_templates(folder: Path) -> None:
    qwen2(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": CHATML}, {"name": "rag", "template": "{{ documents }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))


def git_lfs(folder: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"
    (qwen2(folder) / ONE_FILE).write_text(pointer)


def cut(folder: Path) -> None:
    file = qwen2(folder) / ONE_FILE
    file.write_bytes(file.read_bytes()[:-1000])


def page_of_an_error(folder: Path) -> None:
    (qwen2(folder) / ONE_FILE).write_text("<html><body>Access denied.</body></html>")


def mlx(folder: Path) -> None:
    reconfigured(qwen2(folder), quantization={"group_size": 64, "bits": 4})
    quantised(folder, "scales", "biases")


def quantised(folder: Path, *kept: str, packed: torch.dtype = torch.uint8) -> None:
    """Store the layers packed, with what is kept beside them; config.json says nothing of it."""
    if not (folder / ONE_FILE).exists():
        qwen2(folder)

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made = {}
        for name, tensor in tensors.items():
            layer = name.endswith("_proj.weight")
            made[name] = tensor.to(packed) if layer else tensor
            made |= {name.replace("weight", each): torch.ones(2) for each in kept if layer}
        return made

    stored(folder, change)


def gptq_of_old(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name.replace("_proj.weight", "_proj.qweight"): t.to(torch.int32) if "_proj.weight" in name else t
            for name, t in tensors.items()
        }

    stored(qwen2(folder), change)


def tied_to_another_head(folder: Path) -> None:
    qwen2(folder, tie_word_embeddings=True)
    stored(folder, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1})


def tied_and_stored(folder: Path) -> None:
    qwen2(folder, tie_word_embeddings=True)
    stored(folder, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})


def without_its_head(folder: Path) -> None:
    qwen2(folder, tie_word_embeddings=False)
    stored(folder, lambda tensors: {name: t for name, t in tensors.items() if name != "lm_head.weight"})


def rows_added(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: torch.cat([t, t[:8]]) if "embed" in n or "lm_head" in n else t for n, t in tensors.items()}

    stored(qwen2(folder), change)


def with_tokens(folder: Path, *words: str) -> Path:
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    tokenizer.save(str(file))
    return folder


def chatml_marks_added(folder: Path) -> None:
    """A base model whose tokenizer was given ChatML's words, and whose embedding was not resized."""
    write_small(folder, "Qwen2ForCausalLM", ["<|endoftext|>"])
    _whole(folder, small("Qwen2.5-1.5B"), CHATML)
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(file))


def words_added(*words: str) -> Callable[[Path], None]:
    """Words of ordinary text were added to the tokenizer, and the embedding was resized."""

    def make(folder: Path) -> None:
        write_small(folder, "Qwen2ForCausalLM", CHATML_WORDS)
        _whole(with_tokens(folder, *words), small("Qwen2.5-1.5B"), CHATML)

    return make


def with_buffers(folder: Path) -> None:
    buffers = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(3) for n in range(2)}
    stored(llama3(folder), lambda tensors: tensors | buffers)


def both_scalings(folder: Path) -> None:
    as_transformers_5(folder)
    reconfigured(folder, rope_scaling=YARN)


def index_alone(folder: Path) -> None:
    in_parts(qwen2(folder))
    for file in folder.glob("*.safetensors"):
        file.unlink()


def one_part_missing(folder: Path) -> None:
    in_parts(qwen2(folder))
    next(folder.glob("*-of-00002.safetensors")).unlink()


def index_left_behind(folder: Path) -> None:
    whole = (qwen2(folder) / ONE_FILE).read_bytes()
    index_alone(folder)
    (folder / ONE_FILE).write_bytes(whole)


def two_sets(folder: Path) -> None:
    whole = (qwen2(folder) / ONE_FILE).read_bytes()
    in_parts(folder)
    (folder / ONE_FILE).write_bytes(whole)


def gguf(folder: Path) -> None:
    (qwen2(folder) / ONE_FILE).rename(folder / "model-q4_k_m.gguf")


def as_mistral(folder: Path) -> None:
    plain(folder, "Mistral-7B-v0.3", CHATML, CHATML_WORDS, sliding_window=128)
    in_parts(folder)
    save_file({"layers.0.attention.wq.weight": torch.zeros(2)}, folder / "consolidated.safetensors")


def in_dtype(dtype: torch.dtype) -> Callable[[Path], None]:
    return lambda folder: stored(qwen2(folder), lambda tensors: {name: t.to(dtype) for name, t in tensors.items()})


def added(folder: Path, **changes: Any) -> None:
    """Change keys of config.json of a model that is whole."""
    reconfigured(qwen2(folder), **changes)


def in_form(form: Form) -> Callable[[Path], None]:
    """A small Llama with the tokenizer and the template of another family."""

    def make(folder: Path) -> None:
        form.write(folder)
        words = {**json.loads((folder / "tokenizer_config.json").read_text())}
        _whole(folder, small("SmolLM2-135M"), words.pop("chat_template"), **words)

    return make


def copy_of(folder: Path) -> dict[str, Tensor]:
    return weights_of(folder, seed=1)


OF_PAGES = [f"<{slash}{tag}>" for tag in ("table", "tr", "td", "h1", "b", "i", "s", "code", "a") for slash in ("", "/")]
"""Words that the tokenizers of Gemma 2 and 3 know, and that no turn is divided by."""
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
NEW_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e6}

MADE: dict[str, Callable[[Path], object]] = {
    "transformers 4": qwen2,
    "transformers 5": as_transformers_5,
    "save_pretrained": by_transformers_itself,
    "parts and an index": lambda folder: in_parts(qwen2(folder), 3),
    "one part and an index": lambda folder: in_parts(qwen2(folder), 1),
    "a hub's cache": in_a_hubs_cache,
    "bfloat16": in_dtype(torch.bfloat16),
    "float16": in_dtype(torch.float16),
    "a tied head, stored too": tied_and_stored,
    "an untied head": lambda folder: qwen2(folder, tie_word_embeddings=False),
    "rows of padding": lambda folder: qwen2(folder, vocab_size=1024),
    "quantization_config: {}": lambda folder: added(folder, quantization_config={}),
    "rope_scaling: null beside rope_parameters": lambda folder: (
        as_transformers_5(folder) or reconfigured(folder, rope_scaling=None)
    ),
    "YaRN as Qwen's card says": lambda folder: qwen2(folder, rope_scaling=YARN),
    "YaRN in rope_parameters": lambda folder: qwen2(folder, rope_parameters=NEW_YARN),
    "linear scaling": lambda folder: qwen2(folder, rope_scaling={"type": "linear", "factor": 2.0}),
    "LLaMA-Factory": with_files("training_args.bin", "trainer_state.json"),
    "a Trainer's checkpoint": with_files("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"),
    "torchtune's LoRA, merged": by_torchtune,
    "a template that writes a system message": lambda folder: qwen2(folder, WITH_SYSTEM),
    "the template in a file of its own": template_file,
    "additional_chat_templates": additional_templates,
    "several templates by name": named_templates,
    "Qwen3": qwen3,
    "Llama 3.1": llama3,
    "buffers of transformers 4.30": with_buffers,
    "SmolLM2": lambda folder: plain(folder, "SmolLM2-135M", WITH_SYSTEM, CHATML_WORDS),
    "Mistral in ChatML, consolidated.safetensors": as_mistral,
    "an added word of ordinary text": words_added("print"),
    "added blanks": words_added("  "),
    "an added word in brackets": words_added("<obs>"),
    "Llama 3.0": lambda folder: llama3(folder, LLAMA3_0),
    "thinking that the template opens": lambda folder: qwen2(folder, template_text("opens_thinking")),
    "a beginning before ChatML": lambda folder: qwen2(folder, "{{ '<|endoftext|>' }}" + CHATML),
    "blanks that the template takes away": lambda folder: qwen2(folder, TRIMMED),
    "tools in a form of its own": lambda folder: qwen2(folder, TOOLS_OF_ITS_OWN),
    "Mistral": lambda folder: plain(folder, "Mistral-7B-v0.3", INSTRUCTION, ["<s>", "[INST]", "[/INST]", "</s>"]),
    **{f"the form of {name}": in_form(form) for name, form in FORMS.items()},
    "Gemma 3 with words of web pages": in_form(replace(FORMS["Gemma 3"], added=("\n\n", *OF_PAGES))),
    "pytorch_model.bin": lambda folder: as_bin(qwen2(folder)),
    "parts of .bin": lambda folder: in_parts(qwen2(folder), 2, "bin"),
    "git-lfs": git_lfs,
    "a cut download": cut,
    "a page in place of the file": page_of_an_error,
    "torch.compile": prefixed("_orig_mod."),
    "PEFT, not merged": prefixed("base_model.model."),
    "DDP": prefixed("module."),
    "a model of several modalities": prefixed("language_model."),
    "TRL with a value head": prefixed("pretrained_model."),
    "another library's names": prefixed("gpt_neox."),
    "a copy of before": beside("model_before.safetensors", copy_of),
    "LLaMA-Factory's value head": beside("value_head.safetensors", head_of_values),
    "an adapter beside the model": lambda folder: with_adapter(qwen2(folder)),
    "weights in one file and in parts": two_sets,
    "an index alone": index_alone,
    "a part is missing": one_part_missing,
    "an index that was left behind": index_left_behind,
    "GGUF": gguf,
    "MLX": mlx,
    "GPTQ": lambda folder: added(folder, quantization_config={"bits": 4}),
    "GPTQ without a word in config.json": gptq_of_old,
    "bitsandbytes": lambda folder: quantised(folder, "weight.absmax", "weight.quant_map"),
    "float8": lambda folder: quantised(folder, packed=torch.float8_e4m3fn),
    "rope_scaling and rope_parameters": both_scalings,
    "tied in config.json, not in the file": tied_to_another_head,
    "untied in config.json, no head": without_its_head,
    "tokens added, config.json of before": rows_added,
    "ChatML's marks added, embedding not resized": chatml_marks_added,
    "a word added, embedding not resized": lambda folder: with_tokens(qwen2(folder), "<obs>"),
    "Alpaca's form on Qwen's tokenizer": lambda folder: qwen2(folder, ALPACA),
    "a template that is none": lambda folder: qwen2(folder, "{% for m in messages %}"),
    "Llama 2": lambda folder: plain(folder, "SmolLM2-135M", INSTRUCTION, ["<s>", "</s>"]),
    "no template": lambda folder: qwen2(folder, None),
}
_REFUSED, _SILENT = texts_beside(__file__)["refused"], texts_beside(__file__)["silent"]
CASES = tuple(Case(name, make, _REFUSED.get(name), name in _SILENT) for name, make in MADE.items())
"""In the order of the table: what is taken, then what is refused."""


def reference_folder(folder: Path, elsewhere: Path) -> Path:
    """The folder for transformers alone: it would lay an adapter on merged weights again, and takes an empty
    ``quantization_config`` for one that lacks its method."""
    shutil.copytree(folder, elsewhere, ignore=shutil.ignore_patterns("adapter_*", "blobs"))
    if not json.loads((elsewhere / "config.json").read_text()).get("quantization_config", True):
        reconfigured(elsewhere, "quantization_config")
    return elsewhere
