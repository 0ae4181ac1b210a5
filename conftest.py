"""What the tests of all rooms have in common, those of contrib too."""

from __future__ import annotations

import gc
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

# Before torch. Small tensors on several threads wait more than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if TYPE_CHECKING:
    from support.counter_node import LocalNode

# An example that took long was on a busy machine.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

SHARED = {"shared_vllm": "vLLM", "pool": "AppWorld", "unguarded": "AppWorld"}
"""What is too dear to be had on each worker: fixture of ``support/shared_fixtures.py`` to the group that uses it."""


@cache
def shared_by(file: Path) -> str | None:
    """The group of the files that share something dear with this one."""
    text = file.read_text()
    if re.search(r"from support\.(sft_)?ranks import", text):
        return "the process from which ranks are forked"
    if file.parent.name != "integration":
        return None
    return next((group for name, group in SHARED.items() if re.search(rf"def \w+\([^)]*\b{name}\b", text)), None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep on one worker the tests of a file, and of all files that share something dear (``--dist loadfile``)."""
    from xdist.scheduler import LoadFileScheduling

    class ByWhatIsShared(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return shared_by(config.rootpath / file) or file

    return ByWhatIsShared(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have a worker's longest tests go first: those that share what is dear, then the other integration tests."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: 0 if shared_by(item.path) else 1 if item.path.parent.name == "integration" else 2)


def pytest_collection_finish() -> None:
    """Have the garbage collector leave alone all that was imported: each full round would look through it again."""
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", choices=("pure", "torch"), help="tests for `make quick`; pure: without torch")
    parser.addoption("--without-contrib", action="store_true", help="as where nothing of contrib is installed")


def pytest_configure(config: pytest.Config) -> None:
    if chosen := config.getoption("--quick"):
        from support.quick import QuickRules

        config.option.markexpr = "not slow and not integration and not slurm and not drill"
        config.pluginmanager.register(QuickRules(with_torch=chosen == "torch"))
    else:
        config.pluginmanager.import_plugin("support.shared_fixtures")
    if config.getoption("--without-contrib"):
        from loop_plumbing import plug_ins

        sys.modules["loop_contrib"] = None  # type: ignore[assignment]
        plug_ins.PREFIX = "nobody's."


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
def deep_folder() -> Iterator[Path]:
    """A folder for trees deeper than Python recurses: pytest could not remove them from its own, if a test is killed,
    and each later session would end in that."""
    from loop_plumbing.written_tree import remove

    folder = Path(tempfile.mkdtemp(prefix="deep-"))
    yield folder
    remove(folder)


@pytest.fixture
async def running(policy: Path, tmp_path: Path) -> AsyncIterator[LocalNode]:
    """A rollout node of this process, over the counter environment and a scripted server."""
    from support.counter_node import local_node

    async with local_node(policy, tmp_path / "node") as local:
        yield local
