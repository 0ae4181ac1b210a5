"""The weights in a model's folder by the first kilobytes of their files: names, shapes, and whose they are.

No tensor is loaded and torch is not imported. A ``.bin`` file is a pickle: its records are read by an unpickler that
makes nothing but names and numbers of them.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from model_families.base_model import BaseModel, files_digest
from model_families.weight_names import EMBEDDING, HEAD

INDEX = ".index.json"
SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
LARGEST_HEADER = 100 << 20
"""Bytes, as safetensors bounds them; a pickle's records are bounded likewise."""
COMPARED = 64
"""Pieces of two tensors that are compared."""
PIECE = 1 << 16
_GIT_LFS = b"version https://git-lfs"
_NOT_SERVED = ("training_args.bin", "optimizer.bin")
"""Endings of the names of files that vLLM passes over."""
_WRAPPED = {
    "_orig_mod.": "saved from a model that torch.compile made: save its _orig_mod",
    "base_model.model.": "saved from a model of PEFT: save what merge_and_unload() returns",
    "module.": "saved from a wrapper such as DDP: save its module",
    "model.language_model.": "the language part of a larger model: save it as a model of its own",
    "language_model.": "the language part of a larger model: save it as a model of its own",
    "pretrained_model.": "saved from TRL's model with a value head: save its pretrained_model",
    "transformer.": "in the names of another library",
    "model.model.": "saved from a wrapper: save the model in it",
}
"""What stands before the names -> what they are and the cure."""
_QUANTISED = re.compile(
    r".*\.(qweight|qzeros|scales|g_idx|biases|weight_packed|weight_scale(_inv)?|(weight\.)?(absmax|quant_map|SCB))(\..*)?"
)
"""Names of what GPTQ, AWQ, MLX, compressed-tensors, FP8 and bitsandbytes keep beside a weight."""
_WHOLE = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in ``file``: ``place`` is its first byte there and its number of bytes; None where that is not known."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    place: tuple[int, int] | None = None


def weight_files(folder: str | Path) -> list[Path]:
    """The files of a model's weights: the parts that an index names, or the one file, safetensors before ``.bin``.

    Raises:
        ValueError: there are none, an index cannot be read, or a part that it names is missing.
    """
    folder = Path(folder)
    for name in (SAFETENSORS, PICKLED):
        index, whole = folder / f"{name}{INDEX}", folder / name
        if index.is_file():
            return _parts(index, whole.is_file())
        if whole.is_file():
            return [whole]
    raise ValueError(f"{folder} holds no weights: neither {SAFETENSORS} nor {PICKLED}, nor an index of one")


def _parts(index: Path, whole: bool) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        parts = [index.parent / name for name in names]
    except (OSError, AttributeError, TypeError, KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{index} cannot be read as an index of weights: {error!r}") from error
    missing = [part.name for part in parts if not part.is_file()]
    if missing and whole:
        raise ValueError(f"{index} names {missing[0]}, which is not there, and one file holds all: remove the index")
    if missing:
        raise ValueError(
            f"{index.parent / missing[0]} does not exist; {index.name} names it, and {len(missing)} of {len(parts)} "
            "files are missing: download all of the model"
        )
    return parts


def weights_digest(folder: str | Path) -> str | None:
    """16 hex digits that other weights in ``folder`` change, and its tokenizer does not.

    None where no weights of Hugging Face's names can be read, such as a checkpoint of torchtune's own.
    """
    try:
        return files_digest(weight_files(folder))
    except (OSError, ValueError):
        return None


def check_one_set(folder: Path) -> list[Path]:
    """Check that whoever reads the folder reads the same weights; returns their files.

    Raises:
        ValueError: vLLM would load another file, or transformers would.
    """
    files = weight_files(folder)
    whole = [folder / name for name in (SAFETENSORS, PICKLED) if (folder / name).is_file()]
    if whole and whole[0].suffix == files[0].suffix and whole[0] not in files:
        raise ValueError(
            f"{folder} holds two sets of weights: {whole[0].name}, which transformers reads, and the files of "
            f"{whole[0].name}{INDEX}, which vLLM reads; move one away"
        )
    if other := sorted(set(_served(folder)) ^ set(files)):
        raise ValueError(
            f"{folder} holds {other[0].name} beside {files[0].name}: vLLM would load it as weights of the model, too; "
            "move it away"
        )
    return files


def _served(folder: Path) -> list[Path]:
    """The files that vLLM loads."""
    if found := [*folder.glob("*.safetensors")]:
        return _parts(index, False) if (index := folder / f"{SAFETENSORS}{INDEX}").is_file() else found
    return [file for file in folder.glob("*.bin") if not file.name.endswith(_NOT_SERVED)]


def check_weights(folder: str | Path, base: BaseModel) -> None:
    """Check the weights in ``folder`` against ``base``, its description: files, names, shapes and a tied head.

    Raises:
        ValueError: names the file, what is wrong with it and the cure; one line.
    """
    folder, stored = Path(folder), dict[str, StoredTensor]()
    for file in check_one_set(folder):
        stored |= read_header(file)
    expected = base.weight_shapes()
    found = {name: tensor for name, tensor in stored.items() if not name.endswith("rotary_emb.inv_freq")}
    head = found.pop(HEAD, None) if base.tied else None
    _check_names(folder, found, expected)
    for name, shape in expected.items():
        _check_tensor(name, found[name], shape)
    if head is not None and not _alike(head, found[EMBEDDING]):
        raise ValueError(
            f"{folder}: {HEAD} is not {EMBEDDING}, to which config.json ties it (tie_word_embeddings); make it false"
        )


def _check_names(folder: Path, found: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    strange = [name for name in found if name not in expected]
    missing = [name for name in expected if name not in found]
    if strange:
        raise ValueError(f"{found[strange[0]].file}: {_kind(strange, found, expected)}")
    if missing == [HEAD]:
        raise ValueError(
            f"{folder} holds no {HEAD}, and config.json does not tie it to the embedding: make tie_word_embeddings "
            "true if they are the same, or copy the weights anew"
        )
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{folder} lacks the weight {missing[0]}{more}; are config.json and weights of one model?")


def _kind(strange: Sequence[str], found: Mapping[str, StoredTensor], expected: Mapping[str, Any]) -> str:
    """What weights of such names are, and the cure."""
    name = strange[0]
    for prefix, kind in _WRAPPED.items():
        if any(
            each.removeprefix(prefix) in expected or f"model.{each.removeprefix(prefix)}" in expected
            for each in strange
            if each.startswith(prefix)
        ):
            return f"{next(each for each in strange if each.startswith(prefix))} is {kind}"
    if any(".lora_" in each or ".base_layer." in each for each in strange):
        return f"{name} is part of an adapter that is not merged: save what merge_and_unload() returns"
    if any(map(_QUANTISED.fullmatch, strange)):
        return "the weights are quantised, which cannot be trained; take the model's own"
    if any(each.startswith(("v_head.", "value_head.", "score.", "classifier.")) for each in strange):
        return f"{name} is a value or reward head: save the model without it"
    more = f" ({len(strange)} such weights)" if len(strange) > 1 else ""
    return f"{name} is no weight of the model that config.json describes{more}"


def _check_tensor(name: str, tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype not in _WHOLE:
        raise ValueError(
            f"{tensor.file}: {name} is {tensor.dtype}: the weights are quantised, which cannot be trained; take the "
            "model's own"
        )
    if tensor.shape == shape:
        return
    cure = "are config.json and weights of one model?"
    if name in (EMBEDDING, HEAD) and tensor.shape[1:] == shape[1:]:
        cure = f"if tokens were added, make vocab_size {tensor.shape[0]}"
    raise ValueError(f"{tensor.file}: {name} is {list(tensor.shape)}, and config.json says {list(shape)}; {cure}")


def _alike(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors are the same, by pieces of them where their bytes can be found; the learner compares all."""
    if one.shape != other.shape:
        return False
    if one.dtype != other.dtype or one.place is None or other.place is None:
        return True
    size = one.place[1]
    step = max(PIECE, size // COMPARED)
    with one.file.open("rb") as first, other.file.open("rb") as second:
        for begin in range(0, size, step):
            first.seek(one.place[0] + begin)
            second.seek(other.place[0] + begin)
            length = min(PIECE, size - begin)
            if first.read(length) != second.read(length):
                return False
    return True


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name.

    Raises:
        ValueError: it is no whole file of weights.
    """
    try:
        with file.open("rb") as content:
            begin = content.read(len(_GIT_LFS))
            if begin == _GIT_LFS:
                raise ValueError("is a pointer of git-lfs, not the weights: run `git lfs pull` where it came from")
            content.seek(0)
            return _of_safetensors(file, content) if file.suffix == ".safetensors" else _of_pickle(file, content)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} {error}") from error


def _of_safetensors(file: Path, content: IO[bytes]) -> dict[str, StoredTensor]:
    size = file.stat().st_size
    length = int.from_bytes(content.read(8), "little")
    damaged = "is no safetensors file: copy it anew"
    if size < 10 or length > min(LARGEST_HEADER, size):
        raise ValueError(damaged)
    try:
        header = json.loads(content.read(length))
        header.pop("__metadata__", None)
        tensors, end = {}, 0
        for name, tensor in header.items():
            first, last = tensor["data_offsets"]
            place = (8 + length + int(first), int(last) - int(first))
            tensors[name] = StoredTensor(file, tuple(map(int, tensor["shape"])), str(tensor["dtype"]), place)
            end = max(end, sum(place))
    except (AttributeError, TypeError, KeyError, ValueError, RecursionError) as error:
        raise ValueError(damaged) from error
    if size < end:
        raise ValueError(f"was cut: it has {size} of its {end} bytes; download it anew")
    return tensors


def _of_pickle(file: Path, content: IO[bytes]) -> dict[str, StoredTensor]:
    try:
        if zipfile.is_zipfile(content):
            with zipfile.ZipFile(content) as archive:
                (name,) = (each for each in archive.namelist() if each.endswith("/data.pkl"))
                if archive.getinfo(name).file_size > LARGEST_HEADER:
                    raise ValueError("too large")
                with archive.open(name) as records:
                    state = _Names(records).load()
        else:  # as torch wrote it before 1.6: three records about itself first
            content.seek(0)
            for _ in range(3):
                _Names(content).load()
            state = _Names(content).load()
    except Exception as error:  # a damaged pickle raises almost anything
        why = " ".join(str(error).split())[:200]
        raise ValueError(f"cannot be read as weights of torch ({why}): copy it anew") from error
    if not isinstance(state, dict) or not all(isinstance(tensor, _Tensor) for tensor in state.values()):
        raise ValueError("holds more than weights by name: save the model's state_dict() alone")
    return {str(name): StoredTensor(file, tensor.shape, tensor.dtype) for name, tensor in state.items()}


@dataclass(frozen=True)
class _Tensor:
    shape: tuple[int, ...]
    dtype: str


_STORAGES = {"FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "DoubleStorage": "F64"}


class _Names(pickle.Unpickler):
    """Makes a :class:`_Tensor` of each tensor; knows no other names than those of plain weights."""

    def find_class(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], Callable[..., Any]] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch", "Size"): tuple,
            ("torch._utils", "_rebuild_tensor_v2"): lambda storage, offset, size, *_: _Tensor(tuple(size), storage),
            ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
        }
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return _STORAGES.get(name, name.removesuffix("Storage").lower())
        if (module, name) not in known:
            raise ValueError(f"it holds {module}.{name}")
        return known[module, name]

    def persistent_load(self, record: Any) -> Any:
        return record[1]
