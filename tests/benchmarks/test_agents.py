"""What benchmarks/agents.py counts and starts: tokens that agents of the page have computed, by name or by script."""

from pathlib import Path

import pytest

from support.whole_agents import AGENTS, computed_tokens, environment_of


@pytest.mark.parametrize("name", AGENTS)
def test_each_is_started_by_its_name_or_by_the_script_of_the_page(name):
    environment = environment_of(name, "/opt/bin/program")
    if "agent" not in environment:
        assert f"exec {Path(AGENTS[name].program).name} " in environment["command"][2]
        assert environment["variables"]["PATH"].startswith("/opt/bin:")


def test_what_an_earlier_sequence_shares_is_computed_once():
    assert computed_tokens([[1, 2, 3]]) == 3
    assert computed_tokens([[1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 5, 6], [7]]) == 3 + 2 + 1 + 1
    assert computed_tokens([[1, 2], [1, 2]]) == 2
