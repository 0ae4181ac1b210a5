"""Fixtures of the rollout node's tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.counter_node import LocalNode, local_node


@pytest.fixture
async def running(policy: Path, tmp_path: Path) -> AsyncIterator[LocalNode]:
    async with local_node(policy, tmp_path / "node") as local:
        yield local
