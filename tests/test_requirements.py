"""What is installed, and what the GPU's lock file would install, does not overwrite itself."""

import csv
import importlib.metadata
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]


def locked(name):
    """Versions by package name of one of the lock files."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements" / name).read_text(), flags=re.MULTILINE))


def test_no_two_installed_packages_own_the_same_file():
    """pip and uv let the second overwrite the first, and removing either breaks the other. Run by GPU=1 as well."""
    owners = defaultdict(set)
    for package in importlib.metadata.distributions():
        name, record = package.name, package.read_text("RECORD") or ""
        for path, *_ in csv.reader(record.splitlines()):
            if not path.startswith(("..", "__pycache__")):
                owners[path].add(name)
    assert len(owners) > 1000
    assert {path: sorted(names) for path, names in owners.items() if len(names) > 1} == {}


def test_the_gpu_lock_has_cuda_python_as_the_wrapper_of_its_cuda_bindings():
    """cuda-python 12 holds the files that cuda-bindings has had of its own since; from 13 on it only depends on it."""
    versions = locked("gpu.txt")
    assert versions["cuda-python"].split(".")[0] == versions["cuda-bindings"].split(".")[0]
    assert int(versions["cuda-python"].split(".")[0]) >= 13


def test_the_locks_agree_on_what_they_share():
    """A run on CPUs says something of one on GPUs only if both have the same learner."""
    cpu, gpu = locked("cpu.txt"), locked("gpu.txt")
    for name in ("torchtune", "torchao", "torchdata", "peft", "transformers", "cut-cross-entropy", "omegaconf"):
        assert cpu[name] == gpu[name]
    assert cpu["torch"].removesuffix("+cpu") == gpu["torch"]
