"""A driver of eight H100s that computes nothing: what a wheel for GPUs needs to be imported and to be asked."""

from __future__ import annotations

import subprocess
from pathlib import Path

NVML = """
#include <string.h>
struct memory { unsigned long long total, free, used; };
int nvmlInit(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 8; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(index + 1ul); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetName(void *device, char *name, unsigned length) { strncpy(name, "NVIDIA H100", length); return 0; }
int nvmlDeviceGetMemoryInfo(void *device, struct memory *of) { of->total = of->free = 80ull << 30; return 0; }
"""
"""The management library, as far as torch and vLLM ask it."""
SITE = """
import os, sys
from types import SimpleNamespace

sys.setdlopenflags(os.RTLD_LAZY)  # the driver's functions are looked up when they are called
import torch

card = SimpleNamespace(name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, is_integrated=False)
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_properties = lambda device=None: card
"""
"""What torch would ask the card itself. Every Python process imports it: vLLM looks at a model in one of its own."""


def write_stub_driver(folder: Path) -> dict[str, str]:
    """The variables under which a Python with wheels for GPUs finds the driver, whose files are put into ``folder``."""
    folder.mkdir()
    for name, source in {"libcuda.so.1": "", "libnvidia-ml.so.1": NVML}.items():
        command = ["cc", "-x", "c", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name), "-"]
        subprocess.run(command, input=source, text=True, check=True)
    (folder / "sitecustomize.py").write_text(SITE)
    return {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(folder)}
