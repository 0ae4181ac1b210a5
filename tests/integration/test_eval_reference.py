"""Scripted agents on the real engine, through the recipe, its own rollout node and the adapter.

Reference solutions replayed as an agent score 100, an agent that does nothing 0, and `appworld evaluate` on the same
final states agrees with the report, for a mixed agent too. Only the policy is scripted: vLLM's place is taken by a
server that says, turn by turn, what the agent is to say.
"""

import asyncio
import contextvars
import hashlib
import json
import os
import re
import subprocess
import threading
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from appworld_adapter.dataset import load_split
from eval_appworld import EvalAppWorldRecipe
from loop_formats.places import loop_home
from loop_recipes.evaluation.config import find_policies, read_eval_config
from model_families.chat import open_chat
from model_families.chat.format import ChatFormat
from support.random_policy import write_adapter, write_model
from support.scripted_vllm import ScriptedVllm
from support.waiting import COMMAND_S

pytestmark = pytest.mark.integration

WORLD = loop_home() / "worlds" / "synthetic"
TASKS = 9
"""Of the split that is played: three scenarios of three tasks."""
PYTHON = Path(os.environ.get("APPWORLD_PYTHON", loop_home() / ".venv-appworld/bin/python"))
SPLIT = "dev"
_spoken: contextvars.ContextVar[str] = contextvars.ContextVar("spoken")


class ScriptedAgents(ScriptedVllm):
    """Recognises the task by its text, the turn by the number of assistant turns, the agent by the model asked for."""

    def __init__(self, tokens: ChatFormat, world: Path):
        super().__init__(tokens)
        self.agents: dict[str, str] = {}
        self.speak = lambda rng: _spoken.get()
        self.turns: dict[str, list[str]] = {}
        self.instructions: dict[tuple[str, str], str] = {}
        for task in load_split(world, SPLIT):
            folder = world / "data/tasks" / task
            specs = json.loads((folder / "specs.json").read_text())
            self.instructions[specs["instruction"], specs["supervisor"]["email"]] = task
            turns = json.loads((folder / "ground_truth/turns.json").read_text())
            self.turns[task] = [f"{turn['thought']}\n```python\n{turn['code']}\n```" for turn in turns]

    async def sample(self, body):
        _spoken.set(self._answer(body))
        return await super().sample(body)

    def _answer(self, body):
        ids = body["token_ids"]
        text = self.tokens.decode(ids)
        (task,) = {task for (words, email), task in self.instructions.items() if words in text and email in text}
        header = self.tokens.prompt([])[-len(self.tokens.encode_text("assistant\n")) - 1 :]
        turn = sum(ids[i : i + len(header)] == header for i in range(len(ids))) - 1
        agent = self.agents[re.fullmatch(r"policy-v(\d+)-\w+", body["model"])[1]]
        if agent == "mixed":
            agent = ("solver", "idle", "endless")[hashlib.sha256(task.encode()).digest()[0] % 3]
        if agent == "idle":
            return "```python\napis.supervisor.complete_task()\n```"
        script = self.turns[task][:-1] if agent == "endless" else self.turns[task]
        return script[turn] if turn < len(script) else "```python\nprint('still here')\n```"


def short_world(folder: Path) -> Path:
    """The world with fewer tasks in the split, in links."""
    (folder / "data/datasets").mkdir(parents=True)
    (folder / "dataset.json").symlink_to(WORLD / "dataset.json")
    for name in ("api_docs", "base_dbs", "tasks"):
        (folder / "data" / name).symlink_to(WORLD / "data" / name)
    tasks = load_split(WORLD, SPLIT)[:TASKS]
    (folder / f"data/datasets/{SPLIT}.txt").write_text("\n".join(tasks) + "\n")
    return folder


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
    """(output folder, report) of three scripted agents on the split."""
    if not (WORLD / "data").is_dir() or not PYTHON.exists():
        pytest.skip("needs the synthetic world and the AppWorld environment (make world)")
    folder = tmp_path_factory.mktemp("ev")
    write_model(folder / "model", positions=32768)
    agents = ("solver", "idle", "mixed")
    for seed, agent in enumerate(agents):
        write_adapter(folder / agent, seed)
    world = short_world(folder / "world")
    vllm = ScriptedAgents(open_chat(folder / "model"), world)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    url = asyncio.run_coroutine_threadsafe(vllm.start(), loop).result(30)
    cfg = OmegaConf.create(
        {
            "output_dir": str(folder / "out"),
            "policies": [{"name": agent, "adapter": str(folder / agent)} for agent in agents],
            "split": SPLIT,
            "samplings": [{"temperature": 0.0, "runs": 1}],
            "limits": {
                "max_turns": 12,
                "max_tokens_per_turn": 2000,
                "max_context": 32768,
                "episode_deadline_s": 300,
            },
            "final_states": True,
            "rollout_node": {"launch": True},
            "node": {
                "port": 0,
                "root": str(folder / "out/node"),
                "model": {"path": str(folder / "model"), "dtype": "float32", "max_context": 32768},
                "servers": {"urls": [url]},
                "environment": {
                    "name": "appworld",
                    "python": str(PYTHON),
                    "root": str(world),
                    "prompt": "tiny",
                    "sandbox_minimum": "none",
                },
                "max_concurrent_episodes": 8,
            },
        }
    )
    vllm.agents = {str(p.served_version): p.name for p in find_policies(read_eval_config(cfg))}
    recipe = EvalAppWorldRecipe(cfg)
    try:
        recipe.setup()
        recipe.evaluate()
    finally:
        recipe.cleanup()
        asyncio.run_coroutine_threadsafe(vllm.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
    return folder / "out", json.loads((folder / "out/report.json").read_text())


def scores(report):
    return {score["policy"]: score for score in report["scores"]}


def test_reference_solutions_score_100_and_doing_nothing_0(evaluation):
    _, report = evaluation
    solver, idle = scores(report)["solver"], scores(report)["idle"]
    assert (solver["success"]["mean"], solver["group_success"]["mean"], solver["reward"]) == (100.0, 100.0, 1.0)
    assert (idle["success"]["mean"], idle["group_success"]["mean"]) == (0.0, 0.0)
    assert 0.0 < idle["reward"] < 1.0  # "nothing else changed" passes without doing anything
    assert solver["lost"] == idle["lost"] == []
    assert set(solver["by_difficulty"]) <= {"1", "2", "3"}
    assert solver["by_difficulty"]
    assert report["dataset"].startswith("synthetic")
    assert report["packages"]["appworld"]


def test_an_agent_that_never_ends_its_episode_is_over_budget(evaluation):
    _, report = evaluation
    mixed = scores(report)["mixed"]
    assert 0.0 < mixed["success"]["mean"] < 100.0
    assert mixed["over_budget"]


def test_appworld_evaluate_agrees(evaluation):
    folder, report = evaluation
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    names = {agent: f"{agent}-t0-run0_{SPLIT}" for agent in ("solver", "idle", "mixed")}
    command = [str(PYTHON.parent / "appworld"), "evaluate"]
    graders = [
        subprocess.Popen([*command, name, SPLIT, "--root", str(folder / "final_states")], stdout=subprocess.DEVNULL)
        for name in names.values()
    ]
    assert [grader.wait(COMMAND_S) for grader in graders] == [0, 0, 0]
    for agent, name in names.items():
        saved = json.loads((folder / f"final_states/experiments/outputs/{name}/evaluations/{SPLIT}.json").read_text())
        ours = scores(report)[agent]
        assert saved["aggregate"]["task_goal_completion"] == pytest.approx(ours["success"]["mean"], abs=0.051)
        assert saved["aggregate"]["scenario_goal_completion"] == pytest.approx(ours["group_success"]["mean"], abs=0.051)
        solved = {line["task_id"]: line["solved"] for line in results if line["policy"] == agent}
        assert {task: entry["success"] for task, entry in saved["individual"].items()} == solved
