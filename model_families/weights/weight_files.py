"""Files of weights in a model's folder, and what their headers say: names, shapes, types.

No tensor is loaded and torch is not imported: safetensors reads the headers. A pickle (``.bin``) is not read at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError, safe_open

INDEX = ".index.json"
SAFETENSORS = "model.safetensors"
_GIT_LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in ``file``; ``dtype`` is safetensors' name of the number type, such as "BF16"."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def weight_files(folder: str | Path) -> list[Path]:
    """Return the files of a model's weights: the parts that the index names, or the single file.

    Raises:
        ValueError: the folder has no weights or only pickles, or its index is unreadable or names a missing file.
    """
    folder = Path(folder)
    index, whole = folder / f"{SAFETENSORS}{INDEX}", folder / SAFETENSORS
    if index.is_file():
        return _parts(index, whole.is_file())
    if whole.is_file():
        return [whole]
    if pickled := sorted(folder.glob("pytorch_model*.bin")):
        path = str(folder)
        convert = f"M.from_pretrained({path!r}, dtype='auto').save_pretrained({path!r})"
        raise ValueError(
            f"{folder} holds {pickled[0].name} and no {SAFETENSORS}, and pickles are not read: convert it with "
            f'`python -c "from transformers import AutoModelForCausalLM as M; {convert}"`'
        )
    raise ValueError(f"{folder} holds no weights: neither {SAFETENSORS} nor pytorch_model.bin, nor an index of one")


def _parts(index: Path, whole: bool) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        parts = [index.parent / name for name in names]
    except (OSError, AttributeError, TypeError, KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{index} cannot be read as an index of weights: {error!r}") from error
    missing = [file.name for file in parts if not file.is_file()]
    if missing and whole:
        raise ValueError(f"{index} names {missing[0]}, which is not there, and one file holds all: remove the index")
    if missing:
        raise ValueError(
            f"{index.parent / missing[0]} does not exist; {index.name} names it, and {len(missing)} of {len(parts)} "
            "files are missing: download all of the model"
        )
    return parts


def check_one_set(folder: Path) -> list[Path]:
    """Check that vLLM, transformers and we read the same weights in the folder; return the files.

    Raises:
        ValueError: vLLM would load another file, or transformers would.
    """
    files, whole = weight_files(folder), folder / SAFETENSORS
    if files != [whole] and whole.is_file() and whole not in files:
        raise ValueError(
            f"{folder} holds two sets of weights: {whole.name}, which transformers reads, and the files of "
            f"{whole.name}{INDEX}, which vLLM reads; move one away"
        )
    beside = sorted(set(folder.glob("*.safetensors")) - set(files))
    if beside and not (folder / f"{SAFETENSORS}{INDEX}").is_file():
        raise ValueError(
            f"{folder} holds {beside[0].name} beside {files[0].name}: vLLM would load it as weights of the model, too; "
            "move it away"
        )
    return files


def read_header(file: Path) -> Mapping[str, StoredTensor]:
    """Return the tensors of a file by name, in the order of their bytes. An unchanged file is read only once.

    Raises:
        ValueError: the file does not hold whole weights.
    """
    try:
        state = file.stat()
        return _header(file, state.st_size, state.st_mtime_ns)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error


@lru_cache(maxsize=1024)
def _header(file: Path, size: int, changed_ns: int) -> Mapping[str, StoredTensor]:
    try:
        with safe_open(file, framework="np") as content:
            slices = {name: content.get_slice(name) for name in content.offset_keys()}
            return {name: StoredTensor(file, tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}
    except SafetensorError as error:
        with file.open("rb") as damaged:
            pointer = damaged.read(len(_GIT_LFS)) == _GIT_LFS
        why = "is not a safetensors file: copy it anew"
        if pointer:
            why = "is a pointer of git-lfs, not the weights: run `git lfs pull` where it came from"
        elif "not fully covered" in str(error):
            why = f"was cut: its {size} bytes are not as many as its header says; download it anew"
        raise ValueError(f"{file} {why}") from error
