"""Compiles kernels of Cut Cross-Entropy for an H100 (sm_90), which needs no GPU: `released` or `ours`.

Prints one line of JSON: for each kernel, in the order of its PTX and repetitions left out, the stores to global memory,
barriers and atomic operations; and ``spilled``, the bytes of registers that the backward kernel stores and loads again.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
import yaml
from cut_cross_entropy import cce_backward, cce_lse_forward
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

INTERESTING = re.compile(r"^\s*(?:@!?%p\d+ )?((?:st\.global|bar\.sync|barrier\.|atom\.)\S*)", re.MULTILINE)

CONSTANTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
BF16 = {name: "*bf16" for name in ("E", "C", "hidden", "weight")}
FP32 = {name: "*fp32" for name in ("LSE", "dOut", "dE", "dC", "partial")}
OTHERS = {"Targets": "*i64", "Locks": "*i32", "dELocks": "*i32", "dCLocks": "*i32", "grad_scale": "fp32"}


def compiled(kernel, constants, warps, stages):
    """PTX of a kernel for bf16, as it is compiled when pointers and integers are divisible by 16."""
    while not isinstance(kernel, triton.JITFunction):  # heuristics and autotuning lie around it
        kernel = kernel.fn
    types = BF16 | FP32 | OTHERS
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, kind in enumerate(signature.values())
        if kind.startswith("*") or kind == "i32"
    }
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages}).asm["ptx"]


def spilled(ptx):
    """Bytes of spill stores and loads that the assembler which triton brings counts."""
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        words = [assembler, "-v", "--gpu-name", "sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill", said)))


def main():
    warps = 4
    if sys.argv[1] == "ours":
        from loop_recipes.engine import cce_kernels  # gives the package's kernel our lock

        forward = compiled(cce_kernels.block_log_sum_exp, {**cce_kernels.BLOCKS, "CAP": None}, 8, 3)
        warps = cce_kernels.BACKWARD["num_warps"]
    else:
        forward = compiled(cce_lse_forward._cce_lse_forward_kernel, CONSTANTS["forward"], 8, 3)
    backward = compiled(cce_backward._cce_backward_kernel, CONSTANTS["backward"], warps, 4)
    kernels = {"forward": forward, "backward": backward}
    found = {name: INTERESTING.findall(ptx) for name, ptx in kernels.items()}
    operations = {name: [word for word, _ in itertools.groupby(words)] for name, words in found.items()}
    print(json.dumps({**operations, "spilled": spilled(kernels["backward"])}))


if __name__ == "__main__":
    main()
