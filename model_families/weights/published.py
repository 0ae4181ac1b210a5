"""Published models: the parts of their config.json that make the decoder, in its own spelling (``published.json``).

A job is planned by them before its weights are fetched, and without a network.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

HUB_OWNERS = {"qwen": "Qwen", "smollm": "HuggingFaceTB", "llama": "meta-llama", "gpt-oss": "openai"}
"""Beginning of a model's name -> its owner on the hub."""
W4A16 = "-quantized.w4a16"
"""The end of the name of a published model of which RedHatAI has made one in four bits."""
_ADDRESS = re.compile(r"\b(?:huggingface\.co|hf\.co|hf-mirror\.com)/([\w.-]+/[\w.-]+)", re.ASCII)
_ELSEWHERE = re.compile(r"\w+:/|[\w.-]+@[\w.-]+:")
_OLLAMA = re.compile(r"[\w./-]+:[\w.-]+", re.ASCII)


@cache
def published() -> dict[str, dict[str, Any]]:
    """Return the stored parts of each published model's config.json by the model's name without ``-Instruct``."""
    return json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))


def published_config(path: str | Path) -> dict[str, Any] | None:
    """Return the config.json of the published model whose name a folder or hub name has; None if we know no such
    model."""
    name = Path(str(path).partition("@")[0]).name
    whole = name.removesuffix(W4A16)
    config = published().get(whole) or published().get(whole.removesuffix("-Instruct"))
    if config is None or whole == name:
        return config
    from model_families.weights.four_bits import PUBLISHED  # rarely needed

    return config | {"quantization_config": PUBLISHED}


def describe_wrong_path(path: str | Path) -> str:
    """Return the rest of an error line that begins with ``path``: what is there instead of a model, and the cure."""
    name, folder = str(path), Path(path)
    address = _ADDRESS.search(name)
    inner = [str(file.parent) for depth in ("*", "*/*") for file in sorted(folder.glob(f"{depth}/config.json"))]
    gguf, run = any(folder.glob("*.gguf")), (folder / "config.yaml").is_file() or (folder / "policies").is_dir()
    kinds = {
        f"is an address; the model's name on the hub is {address and address[1]}: give that": address,
        "is an address of no hub; give a folder here, or the model's name on the hub": _ELSEWHERE.match(name),
        "is GGUF, which is not read; give the model as it was published, in safetensors": gguf or name.endswith("gguf"),
        "is a name of Ollama's; give the model's name on the hub, OWNER/NAME": _OLLAMA.fullmatch(name),
        f"is a file; give its folder, {folder.parent}": folder.is_file(),
        "holds an adapter; give its base model, and it as initial_adapter": (folder / "adapter_config.json").is_file(),
        f"is the folder of a run; `loop export {path} merge=bf16` makes a model of its policy": run,
        f"holds no config.json, and folders within do; give one of {', '.join(inner[:5])}": inner,
    }
    if kind := next((kind for kind, applies in kinds.items() if applies), None):
        return kind
    owners = [owner for begin, owner in HUB_OWNERS.items() if folder.name.lower().startswith(begin)]
    owners = ["RedHatAI"] if folder.name.endswith(W4A16) else owners
    if published_config(path) is None or not owners:
        return "holds no config.json; download it (tune download), or make it (`make smollm2`, `make warm-start`)"
    made = "`make smollm2` makes it, or " if folder.name == "SmolLM2-135M-Instruct" else ""
    return f"holds no config.json; {made}download it: tune download {owners[0]}/{folder.name} --output-dir {path}"
