"""benchmarks/agents.py: what counts as a problem, and that each agent it names can be started."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from support import whole_agents
from support.whole_agents import AGENTS, Outcome, computed_tokens, environment_of

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "agents.py"
FINE = {"turns": 5, "first_prompt": 9, "stored": 20, "computed": 20, "end_reason": "completed", "exit_status": 0}


@pytest.fixture
def agents(monkeypatch):
    spec = importlib.util.spec_from_file_location("agents_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(whole_agents, "write_policy", lambda folder: folder)
    return module


def run(agents, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["agents.py", *words])
    return agents.main()


@pytest.mark.parametrize(
    ("name", "of", "problem"),
    [
        ("codex", {}, None),
        ("codex", {"sequences": 2}, "2 sequences"),
        ("aider", {"sequences": 2}, None),
        ("aider", {"reward": 0.0}, "reward 0"),
        ("pi", {"refusals": [{"status": 404}]}, "1 refusals"),
        ("pi", RuntimeError("it never asked"), "it never asked"),
    ],
)
def test_what_is_wrong_with_an_episode_is_said_and_ends_with_1(agents, monkeypatch, capsys, name, of, problem):
    async def play(agent, *_):
        if isinstance(of, Exception):
            raise of
        return Outcome(agent, **{"sequences": 1, "reward": 1.0, **FINE, **of})

    monkeypatch.setattr(whole_agents, "play", play)
    assert run(agents, monkeypatch, name, "--json") == (0 if problem is None else 1)
    printed = capsys.readouterr()
    assert [(row["agent"], row["problem"]) for row in json.loads(printed.out)] == [(name, problem)]
    assert (problem or "ok") in printed.err


def test_an_agent_that_is_not_there_is_named(agents, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(agents, monkeypatch, "codecks")
    assert "there is no codecks; there are codex, claude-code" in capsys.readouterr().err


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
