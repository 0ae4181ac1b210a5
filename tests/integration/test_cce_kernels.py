"""Cut Cross-Entropy's kernels without a GPU: run by Triton's interpreter, and compiled for an H100.

The interpreter runs the programs of a kernel one after the other, so it cannot show that they get into each other's
way; what they compile to can. On a GPU see test_logprobs.py.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import COMMAND_S

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


def with_triton(script, *words, **environment):
    """What a script of tests/support prints as its last line; it finds triton where a CPU's .venv has none."""
    environment = os.environ | environment
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(TRITON)]))
    command = [sys.executable, ROOT / "tests" / "support" / script, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def errors():
    """Of log-probs and gradients against float64, by case."""
    return with_triton("cce_interpreted.py", TRITON_INTERPRET="1")


def lock_is_held_until_all_have_stored(operations):
    """Whether a barrier lies between each release (an exchange) and the stores before it."""
    releases = [place for place, operation in enumerate(operations) if ".exch." in operation]
    assert releases
    before = [operations[:place] for place in releases]
    return all(
        max(i for i, operation in enumerate(part) if operation.startswith("bar"))
        > max(i for i, operation in enumerate(part) if operation.startswith("st.global"))
        for part in before
    )


def test_no_program_releases_a_lock_before_all_of_its_stores(tmp_path):
    """A lost update makes log-probs too high, or the gradient wrong, by a little and now and then."""
    ours = with_triton("cce_ptx.py", "ours", TRITON_CACHE_DIR=str(tmp_path))
    assert lock_is_held_until_all_have_stored(ours["backward"])
    assert not any(operation.startswith("atom") for operation in ours["forward"])
    assert any(operation.startswith("st.global") for operation in ours["forward"])
    assert ours["spilled"] < 600, "with the package's 4 warps it is thousands"


@pytest.mark.drill
def test_the_package_as_released_has_that_race(tmp_path):
    """Why cce_kernels.py mends both: should a release of the package have the barrier, it can go from there."""
    released = with_triton("cce_ptx.py", "released", TRITON_CACHE_DIR=str(tmp_path))
    assert not lock_is_held_until_all_have_stored(released["forward"])
    assert not lock_is_held_until_all_have_stored(released["backward"])
    assert released["spilled"] > 2000


@pytest.mark.parametrize(
    "case", ["whole blocks", "ragged blocks", "more than one block of everything", "one token", "capped logits", COMMON]
)
def test_log_probs_and_gradient_are_those_of_the_definition(errors, case):
    """fp16 rounds a number by 2e-4 of it on average; the kernel rounds once inside, and what comes out once more."""
    assert errors[case]["logprob"] < 1e-5
    assert errors[case]["gradient"] < (8e-4 if case == COMMON else 4e-4)


def test_the_packages_own_function_rounds_the_targets_logit_and_the_sum_of_the_gradient(errors):
    """Why cce_kernels.py is there: should a release of the package no longer do so, it can go."""
    package = errors["the package's own"]
    assert errors["full logits"]["logprob"] < 1e-5 < 1e-3 < package["logprob"]
    assert errors["full logits"]["gradient"] < 3e-4 < 3 * errors[COMMON]["gradient"] < package["gradient"]
