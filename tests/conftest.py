"""Puts this folder on the import path, so that tests of all rooms can import its helper modules."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

# Before torch. Small tensors on several threads wait more than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import agent_environments  # noqa: F401 - before torch, for the variable that it sets

if TYPE_CHECKING:
    from support.counter_node import LocalNode

# An example that took long was on a busy machine.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

SHARED = {"shared_vllm": "vLLM", "pool": "AppWorld", "unguarded": "AppWorld"}
"""What is too dear to be had on each worker: fixture of ``tests/integration/conftest.py`` to the group that uses it."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep on one worker what shares something: the tests of a file, and those that use what is dear.

    The longest go first: what is dear, then the other integration tests. For ``pytest -n COUNT --dist loadgroup``;
    without workers the files stay in their order.
    """
    if not config.getoption("loadgroup", False):
        return
    places: dict[pytest.Item, int] = {}
    for item in items:
        integration = item.path.parent.name == "integration"
        shared = [SHARED[name] for name in item.fixturenames if name in SHARED and integration]
        item.add_marker(pytest.mark.xdist_group(shared[0] if shared else item.nodeid.partition("::")[0]))
        places[item] = 0 if shared else 1 if integration else 2
    items.sort(key=places.__getitem__)


def pytest_collection_finish() -> None:
    """Have the garbage collector leave alone all that was imported: each full round would look through it again."""
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", choices=("pure", "torch"), help="tests for `make quick`; pure: without torch")


def pytest_configure(config: pytest.Config) -> None:
    if chosen := config.getoption("--quick"):
        from support.quick import QuickRules

        hypothesis.settings.register_profile("quick", hypothesis.settings.get_profile("any machine"), max_examples=10)
        hypothesis.settings.load_profile("quick")
        config.option.markexpr = "not slow and not integration and not slurm and not drill"
        config.pluginmanager.register(QuickRules(with_torch=chosen == "torch"))


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random policy, ``model``, and two adapters for it, ``adapter0`` and ``adapter1``."""
    from support.random_policy import (  # imports torch, which most sessions of one test do without
        write_adapter,
        write_model,
    )

    folder = tmp_path_factory.mktemp("policy")
    write_model(folder / "model")
    for seed in range(2):
        write_adapter(folder / f"adapter{seed}", seed)
    return folder


@pytest.fixture
async def running(policy: Path, tmp_path: Path) -> AsyncIterator[LocalNode]:
    """A rollout node of this process, over the counter environment and a scripted server."""
    from support.counter_node import local_node

    async with local_node(policy, tmp_path / "node") as local:
        yield local
