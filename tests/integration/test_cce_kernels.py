"""Cut Cross-Entropy's kernels, run on a CPU by Triton's interpreter; on a GPU see test_logprobs.py."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRITON = ROOT / ".triton"  # a CPU's .venv has none

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not TRITON.exists() and importlib.util.find_spec("triton") is None,
        reason="no triton: run `make .triton/.installed`",
    ),
]


COMMON = "a head with a common direction"


@pytest.fixture(scope="module")
def errors():
    """Of log-probs and gradients against float64, by case."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(TRITON)]))
    command = [sys.executable, ROOT / "tests" / "cce_interpreted.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "case", ["whole blocks", "ragged blocks", "more than one block of everything", "one token", COMMON]
)
def test_log_probs_and_gradient_are_those_of_the_definition(errors, case):
    """fp16 rounds a number by 2e-4 of it on average; the kernel rounds once inside, and what comes out once more."""
    assert errors[case]["logprob"] < 1e-5
    assert errors[case]["gradient"] < (1.5e-3 if case == COMMON else 4e-4)


def test_the_packages_own_function_rounds_the_targets_logit_and_the_sum_of_the_gradient(errors):
    """Why cce_kernels.py is there: should a release of the package no longer do so, it can go."""
    package = errors["the package's own"]
    assert errors["full logits"]["logprob"] < 1e-5 < 1e-3 < package["logprob"]
    assert errors["full logits"]["gradient"] < 3e-4 < 3 * errors[COMMON]["gradient"] < package["gradient"]
