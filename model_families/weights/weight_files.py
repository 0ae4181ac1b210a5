"""Files of weights in a model's folder, and what the first kilobytes of each say: names, shapes, types.

No tensor is loaded and torch is not imported. A ``.bin`` file is a pickle: its records are read by an unpickler that
makes nothing but names and numbers of them.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

INDEX = ".index.json"
SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
LARGEST_HEADER = 100 << 20
"""Bytes, as safetensors bounds them; a pickle's records are bounded likewise."""
_GIT_LFS = b"version https://git-lfs"
_NOT_SERVED = ("training_args.bin", "optimizer.bin")
"""Endings of the names of files that vLLM passes over."""


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
