"""Fixtures of the rollout node's tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from counter_node import LocalNode, local_node
from random_policy import write_adapter, write_model


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model`` and two adapters, ``adapter0`` and ``adapter1``."""
    folder = tmp_path_factory.mktemp("policy")
    write_model(folder / "model")
    for seed in range(2):
        write_adapter(folder / f"adapter{seed}", seed)
    return folder


@pytest.fixture
async def running(policy: Path, tmp_path: Path) -> AsyncIterator[LocalNode]:
    async with local_node(policy, tmp_path / "node") as local:
        yield local
