"""For tests that compose hundreds of configs."""

import copy
from functools import cache

import pytest

from loop_recipes.config.files import read_file


@pytest.fixture(autouse=True, scope="module")
def files_read_once():
    """The tests of a module that imports this read each of the files that ship once."""
    with pytest.MonkeyPatch.context() as patch:
        read = cache(read_file)
        patch.setattr("loop_recipes.config.files.read_file", lambda file: copy.deepcopy(read(file)))
        yield
