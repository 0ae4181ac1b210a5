"""For tests that compose hundreds of configs."""

import copy
from functools import cache

import omegaconf._utils
import omegaconf.base
import omegaconf.grammar_parser
import pytest

from loop_recipes.config.files import read_file


@pytest.fixture(autouse=True, scope="module")
def files_read_once():
    """The tests of a module that imports this read each of the files that ship once, and parse an interpolation once.

    OmegaConf's parser takes a third of the time of a config, and its trees are only read.
    """
    parse = cache(omegaconf.grammar_parser.parse)
    with pytest.MonkeyPatch.context() as patch:
        for module in (omegaconf.base, omegaconf._utils):
            patch.setattr(module, "parse", parse)
        read = cache(read_file)
        patch.setattr("loop_recipes.config.files.read_file", lambda file: copy.deepcopy(read(file)))
        yield
