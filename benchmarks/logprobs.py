"""Log-probs of sampled tokens with their gradient: peak memory and time of several heads, side by side.

    python benchmarks/logprobs.py [--tokens 1024 2048 4096 8192] [--width 1024] [--json results.json]

Forward and backward from hidden states [n, d] through a frozen head [v, d], v = 151,936 (Qwen2.5), to the gradient of
the hidden states, as LoRA training needs it. Every case runs in a process of its own. ``peak_mib`` is how far memory
rose above what the inputs already took: resident set on the CPU, allocated bytes on CUDA. ``seconds`` is the fastest of
``--repeats`` after one small warm-up; ``cpu_seconds``, on the CPU only, is the processor time the same run took, which
other programs on the machine disturb less. ``error`` is the largest difference of a log-prob from full float32 logits.

TRL's row needs `pip install trl==1.16.0` (it may lie in another folder, named by PYTHONPATH) and is left out otherwise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from peak_memory import PeakMemory
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions
from torchtune.modules.loss import CEWithChunkedOutputLoss

from loop_recipes.engine.cut_cross_entropy import CutCrossEntropyLogProbs
from loop_recipes.engine.logprobs import TensorCoreLogProbs, TiledLogProbs

TRL_VERSION = "1.16.0"
Head = Callable[[Tensor, Tensor, Tensor], Tensor]


class Unavailable(Exception):
    """A case cannot run here; the message says why."""


def tiled() -> Head:
    return TiledLogProbs()


def tensor_cores() -> Head:
    if not torch.cuda.is_available():
        raise Unavailable("tensor cores are CUDA's")
    return TensorCoreLogProbs()


def cut_cross_entropy() -> Head:
    if not torch.cuda.is_available():
        raise Unavailable("Cut Cross-Entropy's kernels run on CUDA only")
    return CutCrossEntropyLogProbs()


def full_logits() -> Head:
    return lambda hidden, weight, targets: -F.cross_entropy((hidden @ weight.T).float(), targets, reduction="none")


def torch_chunked() -> Head:
    """Return torch's own fused head and loss, in chunks of its choice. Its products are rounded as the operands are."""
    options = LinearCrossEntropyOptions()
    return lambda hidden, weight, targets: (
        -F.linear_cross_entropy(hidden, weight, targets, reduction="none", options=options)
    )


def torch_chunked_fp32() -> Head:
    """Return the same of operands in fp32, as exact as ours."""
    head = torch_chunked()
    return lambda hidden, weight, targets: head(hidden.float(), weight.float(), targets)


def torchtune_chunked() -> Head:
    """Return torchtune's loss behind the decoder's ``chunked_output``; it only gives the mean, so that is used."""
    loss = CEWithChunkedOutputLoss(num_output_chunks=8)

    def head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = [F.linear(chunk, weight) for chunk in hidden[None].chunk(8, dim=1)]
        return -loss(logits, targets[None]) * len(targets)

    return head


def trl_chunked() -> Head:
    try:
        import trl
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE, _ChunkedLogProbFunction
    except ImportError as error:
        raise Unavailable(f"{error}; pip install trl=={TRL_VERSION}") from error
    if trl.__version__ != TRL_VERSION:
        raise Unavailable(f"trl {trl.__version__} is installed, the comparison is with {TRL_VERSION}")
    size = _CHUNKED_LOGPROB_CHUNK_SIZE
    return lambda hidden, weight, targets: _ChunkedLogProbFunction.apply(
        hidden, weight, None, targets, 1.0, size, None, 1.0, ("log_probs",)
    )[0]


CASES: dict[str, Callable[[], Head]] = {
    "ours_tiled": tiled,
    "ours_tensor_cores": tensor_cores,
    "ours_cce": cut_cross_entropy,
    "full_logits": full_logits,
    "torch_chunked": torch_chunked,
    "torch_chunked_fp32": torch_chunked_fp32,
    "torchtune_chunked": torchtune_chunked,
    "trl_chunked": trl_chunked,
}


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Measure a case in this process."""
    torch.manual_seed(0)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    head, (tokens,) = CASES[args.case](), args.tokens
    weight = (torch.randn(args.vocab, args.width, device=device) * args.width**-0.5).to(dtype)
    hidden = torch.randn(tokens, args.width, device=device).to(dtype).requires_grad_()
    targets = torch.randint(0, args.vocab, (tokens,), device=device)
    upstream = torch.randn(tokens, device=device) / tokens

    def step(rows: slice) -> Tensor:
        logprobs = head(hidden[rows], weight, targets[rows])
        logprobs.backward(upstream[rows] if logprobs.ndim else torch.ones((), device=device))
        if device.type == "cuda":
            torch.cuda.synchronize()
        return logprobs.detach()

    step(slice(0, 16))
    peak, seconds, cpu_seconds = PeakMemory(device), [], []
    for _ in range(args.repeats):
        hidden.grad = None
        started, cpu_started = time.perf_counter(), time.process_time()
        logprobs = step(slice(0, tokens))
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu_started)
    result = {"peak_mib": peak.rise_mib(), "seconds": min(seconds)}
    if device.type == "cpu":
        result["cpu_seconds"] = min(cpu_seconds)
    if logprobs.ndim:
        sample = slice(0, 256)
        logits = hidden.detach()[sample].float() @ weight.float().T
        expected = logits.log_softmax(-1).gather(1, targets[sample, None]).squeeze(1)
        result["error"] = (logprobs[sample] - expected).abs().max().item()
    return result


def run_case(args: argparse.Namespace, case: str, tokens: int) -> dict[str, float] | str:
    """Measure in a child process; the reason as text where that cannot be done."""
    command = [sys.executable, __file__, "--case", case, "--tokens", str(tokens), "--repeats", str(args.repeats)]
    for name in ("vocab", "width", "dtype", "device"):
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}: out of memory?"])[-1]
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--case", choices=list(CASES), help="measure this one in this process and print JSON")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    if args.case:
        try:
            print(json.dumps(measure(args)))
        except Unavailable as reason:
            sys.exit(f"left out: {reason}")
        return

    print(f"v={args.vocab:,} d={args.width} {args.dtype} {args.device}, torch {torch.__version__}, ", end="")
    print(f"{torch.get_num_threads()} thread(s); forward and backward")
    print(f"{'case':<20}{'tokens':>8}{'peak MiB':>10}{'seconds':>9}{'CPU s':>8}{'error':>8}")
    rows = []
    for tokens in args.tokens:
        for case in CASES:
            result = run_case(args, case, tokens)
            if isinstance(result, str):
                print(f"{case:<20}{tokens:>8}  {result}", flush=True)
                continue
            cpu = f"{result['cpu_seconds']:.2f}" if "cpu_seconds" in result else "-"
            error = f"{result['error']:.0e}" if "error" in result else "-"
            numbers = f"{result['peak_mib']:>10.0f}{result['seconds']:>9.2f}{cpu:>8}{error:>8}"
            print(f"{case:<20}{tokens:>8}{numbers}", flush=True)
            for metric, unit in (("peak_mib", "MiB"), ("seconds", "s"), ("cpu_seconds", "s")):
                if metric in result:
                    value = round(result[metric], 4)
                    rows.append({"case": f"{case} {tokens}", "metric": metric, "value": value, "unit": unit})
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
