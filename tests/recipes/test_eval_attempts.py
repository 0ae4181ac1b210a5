"""Which attempts an evaluation plays that is asked for again: an attempt is (policy, sampling, task, run)."""

import asyncio
import contextlib
import json
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from eval_appworld import EvalAppWorldRecipe
from loop_formats.run_files import find_logs, read_lines
from loop_recipes.verbs.compare import main as compare
from support.counter_node import TOKEN, local_node
from support.random_policy import write_adapter, write_model
from support.small_runs import set_up

TASKS = ["reach4_1", "reach4_2", "reach6_1"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    write_model(folder / "model")
    return folder


@pytest.fixture(autouse=True)
def _token(monkeypatch):
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", TOKEN)


@contextlib.asynccontextmanager
async def evaluations(policy, tmp_path, **node):
    """Gives a function that evaluates with some changes; it returns the attempts that were played, and the report."""
    async with local_node(policy, tmp_path / "node", publish=False, **node) as local:
        local.vllm.speak = lambda rng: "y" if node else "```python\nadd(4)\nfinish()\n```"
        base = {
            "output_dir": str(tmp_path / "evaluation"),
            "policies": [{"name": "base"}],
            "rollout_node": {"url": local.url},
            "limits": {"max_turns": 3, "max_tokens_per_turn": 64, "max_context": 1000, "episode_deadline_s": 300},
            "tasks": TASKS[:2],
            "samplings": [{"runs": 2}],
            "statistics": {"resamples": 100},
        }

        def run(changes):
            recipe = EvalAppWorldRecipe(OmegaConf.create(base | changes))
            with set_up(recipe):
                files = recipe.evaluate()
            results = [json.loads(line) for line in Path(files[0]).read_text().splitlines()]
            return results, json.loads(Path(files[1]).read_text()), Path(files[2]).read_text()

        played = set()

        async def evaluate(**changes):
            results, report, text = await asyncio.to_thread(run, changes)
            now = {line.record["rollout_id"] for log in find_logs(tmp_path / "node") for line in read_lines(log)}
            new = len(now - played)
            played.update(now)
            assert {line["rollout_id"] for line in results} <= now
            return new, report, text

        yield evaluate


@pytest.mark.fault("an evaluation that is asked for more")
async def test_what_is_there_is_used_whatever_else_is_asked_for(policy, tmp_path):
    async with evaluations(policy, tmp_path) as evaluate:
        asked = [
            ({}, 4),
            ({"tasks": TASKS}, 2),  # one more task
            ({"tasks": TASKS[::-1]}, 0),  # another order
            ({"tasks": TASKS, "samplings": [{"runs": 3}]}, 3),  # one more run
            ({"tasks": TASKS[:1], "samplings": [{"runs": 3}]}, 0),  # fewer tasks
            ({"tasks": TASKS, "samplings": [{"runs": 1}, {"temperature": 1.0, "runs": 1}]}, 3),  # a further sampling
            ({"tasks": TASKS, "policies": [{"name": "other"}]}, 0),  # another name
            ({"tasks": TASKS, "groups": {"four": "reach4_*"}, "retries": 0}, 0),
            ({"tasks": TASKS, "statistics": {"level": 0.9, "resamples": 200}, "deadline_s": 99.0}, 0),
            ({"tasks": None, "split": "dev"}, 8),  # a split that two of these tasks are of
        ]
        for changes, expected in asked:
            played, report, _ = await evaluate(**changes)
            assert played == expected, changes
            assert report["scores"][0]["runs"] == changes.get("samplings", [{"runs": 2}])[0]["runs"]


@pytest.mark.fault("a score whose grader has changed")
async def test_what_rests_on_something_else_is_played_anew_and_told(policy, tmp_path):
    write_adapter(tmp_path / "adapter", 0)
    async with evaluations(policy, tmp_path) as evaluate:
        assert (await evaluate())[0] == 4
        limits = {"max_turns": 2, "max_tokens_per_turn": 64, "max_context": 1000, "episode_deadline_s": 300}
        for changes, what in [
            ({"seed": 1}, "seed"),
            ({"limits": limits}, "limits"),
            ({"policies": [{"name": "base", "adapter": str(tmp_path / "adapter")}]}, "policy"),
        ]:
            played, _, text = await evaluate(**changes)
            assert played == 4, changes
            assert f"in no figure: base, T=0: 4 earlier results, since which changed: {what}\n" in text
        played, report, text = await evaluate()
        assert played == 0, "what came first is there again"
        assert report["scores"][0]["success"]["mean"] == 50.0


FILE = """
from agent_environments.tools import reward

@reward
def correct(answer: str, target: str) -> float:
    return float(answer {test} target)

TASKS = [{{"id": f"q{{n}}", "question": "What?", "target": "x"}} for n in range({tasks})]
"""


@pytest.mark.fault("a score whose grader has changed")
async def test_a_mended_grader_begins_a_new_column(policy, tmp_path, capsys):
    """So does a comment. Scores of two graders are not compared."""
    module = tmp_path / "graded.py"
    environment = {"name": "tools", "module": str(module)}
    found = []
    for test, tasks, comment in [("==", 2, ""), ("!=", 2, ""), ("!=", 2, "# mended\n"), ("!=", 3, "")]:
        module.write_text(comment + FILE.format(test=test, tasks=tasks))
        async with evaluations(policy, tmp_path, environment=environment) as evaluate:
            chosen = {"tasks": ["q0", "q1"], "samplings": [{"runs": 1}]}
            _, report, text = await evaluate(**chosen)
            found.append(
                (report["scores"][0]["success"]["mean"], [line for line in text.splitlines() if "no figure" in line])
            )
        shutil.copytree(tmp_path / "evaluation", tmp_path / f"of{len(found)}")
    assert [score for score, _ in found] == [0.0, 100.0, 100.0, 100.0]
    told = "- in no figure: base, T=0: 2 earlier results, since which changed: "
    assert [lines for _, lines in found] == [
        [],
        [f"{told}code"],
        [f"{told}code"] * 2,
        [f"{told}code, tasks"] * 3,
    ]
    assert compare([str(tmp_path / "of1"), str(tmp_path / "of2")]) == 1
    assert "were graded by different code of the environment" in capsys.readouterr().err
