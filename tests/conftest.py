"""Puts this folder on the import path, so that tests of all rooms can import its helper modules.

`make test` runs two workers. The tests of a file stay together and in order; so do all that share the one vLLM server.
"""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        shares = "shared_vllm" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("shared_vllm" if shares else item.path.name))


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random policy, ``model``, and two adapters for it, ``adapter0`` and ``adapter1``."""
    from random_policy import write_adapter, write_model  # imports torch, which most sessions of one test do without

    folder = tmp_path_factory.mktemp("policy")
    write_model(folder / "model")
    for seed in range(2):
        write_adapter(folder / f"adapter{seed}", seed)
    return folder
