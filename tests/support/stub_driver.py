"""A driver of eight H100s that computes nothing: what a wheel for GPUs needs to be imported and to be asked."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.texts import texts_beside

TEXTS = texts_beside(__file__)
NVML = TEXTS["nvml"]
"""The management library, as far as torch and vLLM ask it."""
SITE = TEXTS["site"]
"""What torch would ask the card itself. Every Python process imports it: vLLM looks at a model in one of its own."""


def write_stub_driver(folder: Path) -> dict[str, str]:
    """The variables under which a Python with wheels for GPUs finds the driver, whose files are put into ``folder``."""
    folder.mkdir()
    for name, source in {"libcuda.so.1": "", "libnvidia-ml.so.1": NVML}.items():
        command = ["cc", "-x", "c", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name), "-"]
        subprocess.run(command, input=source, text=True, check=True)
    (folder / "sitecustomize.py").write_text(SITE)
    return {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(folder)}
