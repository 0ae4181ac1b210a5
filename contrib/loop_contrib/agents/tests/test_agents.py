"""Each agent's start: its prompt is one word, its settings can be read, and it is pointed at the node."""

import asyncio
import json
import re
import tomllib
from pathlib import Path

import pytest

from agent_environments.harness.agents import find_agent
from agent_environments.program_protocol import Connection
from loop_plumbing.plug_ins import plug_ins
from support import whole_agents

NAMES = sorted(plug_ins("agents"))
CONNECTION = Connection('http://node:8700/"/v1', "sk-1", "c1.t_1.0", "c1", 0, 8)
READ = {".toml": tomllib.loads, ".json": json.loads}
PAGE = Path(__file__).parents[4] / "docs" / "agents.md"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt", ["-x --help\n", "quotes \" and ' and $HOME {here}"])
def test_a_start_is_one_that_the_agent_can_read(name, prompt):
    agent = find_agent(name)
    start = agent.start(CONNECTION, prompt)
    told = [word for word in start.command if prompt in word]
    assert told == [start.command[-1]]
    assert told[0].removesuffix(prompt).endswith("=") or start.command[-2] == "--" or name == "openhands-sdk"
    assert [READ[Path(file).suffix](text) for file, text in start.files.items()] or not start.files
    assert all(isinstance(value, str) for value in start.variables.values())


def test_each_is_pinned_and_on_the_page():
    page = PAGE.read_text()
    for name in NAMES:
        agent = find_agent(name)
        assert re.search(r"[@=]\d+\.\d+\.\d+", agent.install)
        assert agent.install in page
        assert name in page
        assert all(package in agent.install for package in whole_agents.AGENTS[name].packages)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    return whole_agents.write_policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.drill
@pytest.mark.parametrize("name", NAMES)
def test_agents_that_were_just_installed_solve_a_task_in_one_sequence(name, scripted, tmp_path):
    program = whole_agents.install(name, tmp_path / "program")
    environment = {"agent": name, "agent_program": program}
    outcome = asyncio.run(whole_agents.play(name, environment, scripted, tmp_path / "episode"))
    assert (outcome.sequences, outcome.turns, outcome.reward) == (1, 5, 1.0)
    assert (outcome.end_reason, outcome.exit_status, outcome.refusals) == ("completed", 0, [])
    assert outcome.first_prompt < find_agent(name).least_context
