"""Bytes that one decoder layer moves through a GPU's memory for each token, and its kernels, counted without a GPU.

    python benchmarks/layer_traffic.py [--models Qwen2.5-7B --tokens 16384] [--json results.json]

A layer with LoRA of rank 16 on all its linears, bf16, one packed row of two rollouts, as the trainer runs it on CUDA:
forward, and backward to the gradients of LoRA and of the layer's input. A layer that is recomputed runs forward twice.

- ``eager``: each operator of torch is a kernel that reads its arguments and writes its results, whole and once.
- ``compiled``: the plan of inductor's scheduler for the same layer for an H100: its fused kernels, each of which reads
  and writes a buffer once, and the products that it calls.

Weights are left out, and all else that does not grow with the tokens. Kinds of kernels: ``base`` are the matrix
products of the frozen weights, ``lora`` those with a side as long as the rank, ``attention`` is counted but not
measured, and ``elementwise`` is the rest. Nothing is computed: tensors have shapes alone, and so the layer runs on the
"CPU" by its code for CUDA, with an operator that stands for CUDA's kernel of RMSNorm, which fuses on no other device.

Then the bytes that operators write in a layer of models that transformers builds, forward and backward together: of a
delta net (Qwen3.5-4B) and of attention with sinks (gpt-oss-20b). Ends 1 where they more than double, by a tenth, with
the tokens of one document.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo import device_interface
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ExternKernel, MultiOutput
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The root and recipes/ too, because folders of tests/ are called like packages and hide those that are installed.
sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "recipes", "tests"))

from torchtune.modules import TransformerDecoder

from loop_recipes.engine.batching import Documents
from loop_recipes.engine.cuda_layers import enable_cuda_layers
from loop_recipes.engine.general_decoder import GeneralDecoder
from loop_recipes.engine.model import meta_model
from loop_recipes.engine.sharding import compile_each_layer
from loop_recipes.plan.published_folder import stored_shapes, write_header
from model_families.weights.published import published_config
from support.families import PUBLISHED, section, write_config
from support.on_cuda import as_on_cuda, norms_of_one_kernel

RANK = 16
MODELS = ("Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-32B")
KINDS = ("elementwise", "lora", "base", "attention")
PASSES = ("forward", "backward")
PRODUCTS = ("mm", "addmm", "addmm_", "add_product")
VIEWS = ("_unsafe_view", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
"""Operators that move nothing, besides those whose schema says so."""
OVERWRITES = ("copy_", "fill_", "zero_")
"""Operators that do not read the tensor that they change."""
GENERAL = {"ours_delta_net": ("Qwen3.5-4B", 1), "ours_sinks": ("gpt-oss-20b", 2)}
"""Case -> a model that transformers builds, and the layers of it that have all kinds of its first ones."""
LENGTHS = tuple(512 << doubled for doubled in range(6))
MAX_GROWTH = 2.2
"""Factor by which the bytes written may grow with each doubling."""
H100 = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block_optin=232448,
)

Operand = tuple[Sequence[int], int]
"""Shape and bytes of what a kernel reads or writes."""


class Traffic:
    """Kernels of a pass, and the bytes of each kind that grow with the tokens.

    Args:
        tokens: of the row; tensors without a side of this length are not counted.
        rank: of LoRA.
    """

    def __init__(self, tokens: int, rank: int) -> None:
        self.tokens, self.rank = tokens, rank
        self.bytes: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()

    def add(self, kind: str, *operands: Operand) -> None:
        """Add a kernel."""
        self.kernels[kind] += 1
        self.bytes[kind] += sum(size for shape, size in operands if self.tokens in shape)

    def add_product(self, factors: Sequence[Operand], out: Operand, start: Operand | None, inplace: bool) -> None:
        """Add a matrix product, added to ``start``. A start with columns of its own is copied first unless it is
        changed in place: cuBLAS only adds to what it writes."""
        kind = "lora" if any(self.rank in shape for shape, _ in factors) else "base"
        added: list[Operand] = []
        if start is not None and len(start[0]) == 2:
            added = [out]
            if not inplace:
                self.add(kind, start, out)
        self.add(kind, *factors, out, *added)

    def per_token(self, kind: str) -> float:
        return self.bytes[kind] / self.tokens


def operand(tensor: Tensor) -> Operand:
    """Return a tensor as an operand; expanded dimensions are read once."""
    own = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return tensor.shape, math.prod(own) * tensor.element_size()


class EagerTraffic(TorchDispatchMode):
    """Adds the kernels of the operators that are called to ``traffic``."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        changes = func._schema.is_mutable
        written = [leaf for leaf in tree_leaves(args[0] if changes else result) if isinstance(leaf, Tensor)]
        if func.is_view or name in VIEWS or not written:
            return result
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        read = [operand(leaf) for leaf in self._distinct(leaves[name in OVERWRITES :])]
        wrote = [operand(leaf) for leaf in written]
        if name in PRODUCTS:
            start = None if name == "mm" else read.pop(0)
            self.traffic.add_product(read, wrote[0], start, changes)
        elif func.namespace == "torch_attn":
            self.traffic.add("attention")
        elif name in ("slice_backward", "select_backward"):
            self.traffic.add("elementwise", *wrote)
            self.traffic.add("elementwise", *read, *read)
        elif name == "index":
            self.traffic.add("elementwise", *read[1:], *wrote, *wrote)
        else:
            self.traffic.add("elementwise", *read, *wrote)
        return result

    @staticmethod
    def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
        places = {
            (t.untyped_storage()._cdata, t.storage_offset(), tuple(t.shape), tuple(t.stride())): t for t in tensors
        }
        return list(places.values())


@contextmanager
def h100() -> Iterator[None]:
    """Let inductor compile for an H100, up to the code, on a machine without one."""
    interface = device_interface.get_interface_for_device("cuda")
    stand_in = type(
        "H100Interface",
        (interface,),
        {
            "is_available": staticmethod(lambda: True),
            "is_bf16_supported": staticmethod(lambda including_emulation=True: True),
            "current_device": staticmethod(lambda: 0),
            "get_device_properties": staticmethod(lambda device=None: H100),
            "get_compute_capability": staticmethod(lambda device=None: 90),
            "raise_if_triton_unavailable": staticmethod(lambda device=None: None),
        },
    )
    with ExitStack() as stack:
        devices = ("cuda", "cuda:0")
        stack.enter_context(patch.dict(device_interface.device_interfaces, dict.fromkeys(devices, stand_in)))
        stack.enter_context(patch.object(torch.cuda, "get_device_properties", lambda device=None: H100))
        stack.enter_context(patch("torch._inductor.scheduler.has_triton", lambda: True))
        # Where a layer writes to slices it copies to see whether shapes fit, which torch's build for CPUs cannot do.
        scatter = "torch._inductor.fx_passes.reinplace._inplace_generalized_scatter"
        stack.enter_context(patch(scatter, lambda tensor, source, views: tensor))
        yield


class _Counted(Exception):
    """Ends a compilation whose kernels are known."""


def counting_backend(traffics: dict[str, Traffic]) -> Callable[..., Any]:
    """Make a backend of torch.compile that adds inductor's kernels to ``traffics``, and runs them uncompiled."""

    def compile_pass(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        traffic = traffics["backward" if options.get("is_backward") else "forward"]
        runs = make_boxed_func(deepcopy(graph).forward)

        def count(lowered: GraphLowering) -> None:
            lowered.init_wrapper_code()
            lowered._update_scheduler()
            for node in lowered.scheduler.nodes:
                add_scheduled(traffic, node)
            raise _Counted

        with h100(), patch.object(GraphLowering, "compile_to_module", count):
            try:
                compile_fx_inner(graph, to_cuda(graph, inputs), **options)
            except InductorError as error:
                if not isinstance(error.inner_exception, _Counted):
                    raise
        return runs

    return partial(compile_fx, inner_compile=compile_pass)


def to_cuda(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Move a graph to CUDA, and return inputs for it there."""
    fakes = detect_fake_mode(inputs)
    assert fakes is not None
    with fakes:
        moved = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda:0") if isinstance(x, Tensor) else x
            for x in inputs
        ]
    for node in graph.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.update_kwarg("device", torch.device("cuda:0"))
    with torch.no_grad():
        FakeTensorProp(graph, fakes).propagate(*moved)
    return moved


def add_scheduled(traffic: Traffic, node: BaseSchedulerNode) -> None:
    """Add one of the scheduler's nodes to ``traffic``."""
    if isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, MultiOutput):
        return
    if not isinstance(node, ExternKernelSchedulerNode):
        accesses = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
        # A buffer changed in place has a name of its own.
        named = {node.scheduler.mutation_real_name.get(name, name): size for name, size in accesses.items()}
        traffic.add("elementwise", *((_lowered(V.graph.try_get_buffer(name))[0], named[name]) for name in named))
        return
    called = node.node
    assert isinstance(called, ExternKernel)
    name = str(called.python_kernel_name).removesuffix(".default").rpartition(".")[2]
    if name.startswith("_varlen_attn"):
        traffic.add("attention")
        return
    read = [_lowered(value) for value in called.inputs]
    changes = name == "add_product"
    out = read[0] if changes else _lowered(called)
    if name in PRODUCTS:
        start = None if name == "mm" else read.pop(0)
        traffic.add_product(read, out, start, changes)
    else:
        traffic.add("elementwise", *read, out)


def _lowered(value: Any) -> Operand:
    """Return one of inductor's nodes as an operand."""
    shape = V.graph.sizevars.optimization_hints(value.get_size())
    return shape, math.prod(shape) * value.get_dtype().itemsize


def decoder_layer(config: dict[str, Any], rank: int, fakes: FakeTensorMode) -> nn.Module:
    """Build a layer of the model that ``config``, a config.json, describes, in bf16 and without values.

    LoRA too is in bf16, as FSDP2 hands it to the layer.
    """
    with tempfile.TemporaryDirectory() as folder:
        folder = write_config(Path(folder), {**config, "num_hidden_layers": 1})
        model = cast(
            TransformerDecoder, meta_model(section(folder, lora_rank=rank, lora_alpha=2 * rank), torch.bfloat16)
        )
    enable_cuda_layers(model)
    layer = model.layers[0]
    with fakes:
        for module in layer.modules():
            for name, tensor in module.named_parameters(recurse=False):
                fake = torch.empty(tensor.shape, dtype=torch.bfloat16)
                module.register_parameter(name, nn.Parameter(fake, tensor.requires_grad))
            if hasattr(module, "rope_init"):
                module.rope_init()
    return layer


def layer_traffic(config: dict[str, Any], tokens: int, compiled: bool, rank: int = RANK) -> dict[str, Traffic]:
    """Count traffic of both passes of a layer over a packed row of two rollouts with ``tokens`` tokens together.

    Raises:
        ValueError: ``tokens`` is a size of the layer's weights, which look the same.
    """
    traffics = {name: Traffic(tokens, rank) for name in PASSES}
    # As many positions as tokens: of the rotary table, too, what is read grows with them.
    config = {**config, "max_position_embeddings": tokens}
    fakes = FakeTensorMode()
    layer = decoder_layer(config, rank, fakes)
    if any(tokens in parameter.shape for parameter in layer.parameters()):
        raise ValueError(f"weights of the layer have a side of {tokens} too; give another number of tokens")
    with ExitStack() as stack:
        stack.enter_context(as_on_cuda())
        stack.enter_context(nullcontext() if compiled else norms_of_one_kernel())
        stack.enter_context(fakes)
        x = torch.empty(1, tokens, config["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
        positions = torch.empty(1, tokens, dtype=torch.long)
        documents = Documents(
            (tokens // 2, tokens // 2), torch.empty(3, dtype=torch.int32), torch.empty(tokens // 2, 0)
        )
        modes = {name: nullcontext() if compiled else EagerTraffic(traffics[name]) for name in PASSES}
        if compiled:
            compile_each_layer(SimpleNamespace(layers=[layer]), counting_backend(traffics))
        with modes["forward"]:
            out = layer(x, mask=documents, input_pos=positions)
        upstream = torch.empty_like(out)
        with modes["backward"]:
            out.backward(upstream)
    return traffics


class BytesWritten(TorchDispatchMode):
    """Adds up the bytes of what operators write, but for views."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in VIEWS:
            written = args[0] if func._schema.is_mutable else result
            self.total += sum(leaf.nbytes for leaf in tree_leaves(written) if isinstance(leaf, Tensor))
        return result


def bytes_written(name: str, layers: int, tokens: int) -> int:
    """Return the bytes that the first ``layers`` of a published model write for one document, forward and backward."""
    config = published_config(name)
    assert config is not None
    text = config.get("text_config", config)
    text |= {"num_hidden_layers": layers, "layer_types": text["layer_types"][:layers]}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        write_header(Path(folder) / "model.safetensors", stored_shapes(Path(folder)))
        model = cast(GeneralDecoder, meta_model(section(Path(folder), lora_rank=RANK), torch.bfloat16))
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        model.to_empty(device="cpu")
        model.tok_embeddings.register_forward_hook(lambda module, inputs, out: out.requires_grad_())
        ids, places = (fakes.from_tensor(x) for x in (torch.zeros(1, tokens).long(), torch.arange(tokens)[None]))
        with BytesWritten() as counted:
            row = {"position_ids": places, "documents": Documents.of([tokens])}
            model.text(input_ids=ids, use_cache=False, **row).last_hidden_state.sum().backward()
    return counted.total


def growth(rows: list[dict[str, Any]]) -> int:
    """Print what layers of models that transformers builds write, and add it to ``rows``; returns the exit status."""
    print(f"\nGB that operators write in a layer, forward and backward\n{'':<20}{'tokens':>8}{'GB':>10}{'times':>8}")
    status = 0
    for case, (name, layers) in GENERAL.items():
        before = 0
        for tokens in LENGTHS:
            written = bytes_written(name, layers, tokens) // layers
            times = written / before if before else 0.0
            status |= times > MAX_GROWTH
            print(f"{case:<20}{tokens:>8,}{written / 1e9:>10.2f}{f'{times:.2f}' if before else '':>8}", flush=True)
            rows.append({"case": f"{case} {tokens}", "metric": "bytes_written", "value": written, "unit": "bytes"})
            before = written
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=list(PUBLISHED), nargs="+", default=list(MODELS))
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()

    rows = []
    print(f"bytes a token and kernels of one layer, {args.tokens:,} tokens, torch {torch.__version__}")
    print(f"{'':<32}" + "".join(f"{kind:>22}" for kind in KINDS))
    for model in args.models:
        for way in ("eager", "compiled"):
            for name, traffic in layer_traffic(PUBLISHED[model], args.tokens, way == "compiled").items():
                case = f"{model} {way} {name}"
                cells = ((round(traffic.per_token(kind)), traffic.kernels[kind]) for kind in KINDS)
                print(f"{case:<32}" + "".join(f"{size:>14,} in {kernels:>4}" for size, kernels in cells), flush=True)
                for kind in KINDS:
                    rows.append(
                        {"case": f"{case} {kind}", "metric": "kernels", "value": traffic.kernels[kind], "unit": ""}
                    )
                    if kind != "attention":
                        size = round(traffic.per_token(kind))
                        rows.append(
                            {"case": f"{case} {kind}", "metric": "traffic", "value": size, "unit": "bytes/token"}
                        )
    status = growth(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
