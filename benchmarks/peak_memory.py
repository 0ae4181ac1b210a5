"""How far memory rises while something runs; shared by the benchmarks."""

from __future__ import annotations

from pathlib import Path

import torch

MIB = 2**20


def _resident_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


class PeakMemory:
    """Counts from construction: resident set on the CPU (Linux), allocated bytes on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # sets the recorded peak back to the present value
            self.before = _resident_bytes("VmRSS")

    def rise_mib(self) -> float:
        return self.peak_mib() - self.before / MIB

    def peak_mib(self) -> float:
        """Return the peak, with the memory at construction."""
        return (torch.cuda.max_memory_allocated() if self.cuda else _resident_bytes("VmHWM")) / MIB
