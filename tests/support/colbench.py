"""ColBench's tasks as they are generated, once for all tests of a worker."""

from functools import cache

import pytest

from agent_environments.colbench import generator

generated = cache(generator.generate)
"""Split -> tasks of a seed; nobody changes them."""


@pytest.fixture(autouse=True, scope="module")
def tasks_generated_once():
    """The pools of a module that imports this have the tasks of a seed in common."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator, "generate", generated)
        yield
