"""The page's table of models says what models of each kind are."""

import re
from pathlib import Path

import pytest

from model_families.base_model import BaseModel
from model_families.families.general_model import COMPARED
from support.tiny_models import write_random

PAGE = Path(__file__).parents[2] / "docs/add_a_model.md"
SEVEN = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def rows():
    """The names of kinds in each row, and its other cells."""
    lines = PAGE.read_text(encoding="utf-8").split("| model | `model_type` | LoRA goes on |")[1].split("\n\n")[0]
    for line in lines.splitlines()[2:]:
        _, _, kinds, lora, served, _ = line.split("|")
        yield re.findall(r"`(\w+)`", kinds), lora, served


def said(lora):
    """The layers that a cell names."""
    taken, _, left_out = lora.partition(";")[0].partition("without")
    found, lost = (set(re.findall(r"`(\w+)`", text)) for text in (taken, left_out))
    return (found | (SEVEN if "seven" in taken else set())) - lost


KINDS = [(kind, lora) for kinds, lora, _ in rows() for kind in kinds]


def test_table_has_each_kind_that_is_compared_once_and_says_how_it_is_served():
    assert sorted(kind for kind, _ in KINDS) == sorted(COMPARED)
    assert all(re.match(r" (the whole loop|a node: .*\de-\d|not served)", served) for _, _, served in rows())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "lora"), KINDS)
def test_table_names_the_layers_that_lora_goes_on(kind, lora, tmp_path):
    assert set(BaseModel.read(write_random(kind, tmp_path)).lora_modules) == said(lora)
