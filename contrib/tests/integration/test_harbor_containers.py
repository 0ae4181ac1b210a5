"""Harbor's tasks in real containers: three tasks by nobody, by nonsense and by their solutions; attacks on the grade.

`tests/drills/harbor.sh` makes the image that HARBOR_IMAGE names, and runs this.
"""

import asyncio
import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from agent_environments.protocol import EnvironmentCrashed, acquire, create_pool
from loop_recipes.own_task.oracle import ask_oracle
from support.adapter_support import word_spans
from support.episodes import open_pool
from support.texts import texts_beside

TABLES = texts_beside(__file__)
pytestmark = [pytest.mark.attack, pytest.mark.integration, pytest.mark.drill]
SECRET = "the canary sings at noon"


NONSENSE = """
from harbor.agents.base import BaseAgent

class Nonsense(BaseAgent):
    name = staticmethod(lambda: "nonsense")
    version = lambda self: "1"

    async def setup(self, environment):
        pass

    async def run(self, instruction, environment, context):
        await environment.exec("wibble 7351")
"""
"""An agent for Harbor's own trial."""


@pytest.fixture
def harbor(tmp_path, monkeypatch):
    image = os.environ.get("HARBOR_IMAGE") or pytest.skip("tests/drills/harbor.sh makes an image, and runs this")
    monkeypatch.setenv("LOOP_SECRET", SECRET)
    for name, files in TABLES["tasks"].items():
        for file, text in {**TABLES["shared"], **files}.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(text.replace("IMAGE", image))
    return lambda **options: create_pool("harbor", {"tasks": str(tmp_path), "deadline_s": 15.0, **options}, word_spans)


async def played(pool, task_id, commands, between=lambda environment: None):
    """All that was shown, and the grade."""
    environment = await pool.acquire("episode")
    try:
        await environment.start(task_id)
        shown = []
        for command in commands:
            result = await environment.step(pool.message(command))
            shown.append(result.observation)
            if result.done:
                break
        between(environment)
        return "\n".join(shown), await environment.grade()
    finally:
        await environment.close()


def by_harbor(program, folder):
    """The rewards of Harbor's own trials of the tasks in a folder: its podman back end cannot keep the network away."""
    for file in folder.glob("*/task.toml"):
        file.write_text(file.read_text().replace("no-network", "public"))
    (folder / "nonsense.py").write_text(NONSENSE)
    own = {"HARBOR_TELEMETRY": "off", "PYTHONPATH": str(folder), "PATH": f"{Path(program).parent}:{os.environ['PATH']}"}
    rewards = {}
    for agent in ("nop", "nonsense:Nonsense", "oracle"):
        words = [
            "run",
            "-p",
            folder,
            "-a",
            agent,
            "-e",
            "podman",
            "-n",
            "2",
            "-o",
            folder / "jobs",
            "--job-name",
            agent[:3],
        ]
        done = subprocess.run([program, *words], cwd=folder, env={**os.environ, **own}, capture_output=True, text=True)
        for file in (folder / "jobs" / agent[:3]).glob("*/result.json"):
            trial = json.loads(file.read_text())
            rewards[agent.partition(":")[0], trial["task_name"]] = trial["verifier_result"]["rewards"]["reward"]
        assert len(rewards) % 3 == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return rewards


def test_nothing_and_nonsense_earn_0_and_the_solution_1_as_in_harbors_own_trial(harbor, tmp_path, capsys):
    pool = harbor()
    oracle = ask_oracle(pool, False, lambda: pool.tasks("train"), 3)
    nothing = dict(zip(oracle.right, [played.grade.reward for played in oracle.nothing], strict=True))
    by_agent = {"nop": nothing, "nonsense": oracle.nonsense, "oracle": oracle.right}
    ours = {(agent, task): reward for agent, rewards in by_agent.items() for task, reward in rewards.items()}
    assert ours == {(agent, task): float(agent == "oracle") for agent in by_agent for task in TABLES["tasks"]}
    program = os.environ.get("HARBOR_PROGRAM") or pytest.skip("tests/drills/harbor.sh installs Harbor")
    theirs = by_harbor(program, tmp_path)
    with capsys.disabled():
        print("\nagent     task   reward  Harbor's own")
        for (agent, task), reward in ours.items():
            print(f"{agent:9} {task:6} {reward:6.1f} {theirs.get((agent, task))!s:>13}")
    assert theirs == ours


@pytest.mark.parametrize("name", TABLES["attacks"])
async def test_no_attack_is_paid_or_voids_its_episode(harbor, name):
    async with open_pool(harbor()) as pool:
        shown, grade = await played(pool, "write", TABLES["attacks"][name])
        print(shown[-2000:], grade)
        assert grade.reward == 0.0
        assert [word for word in (SECRET, "REACHED") if word in shown] == []
        assert (await played(pool, "write", await pool.expert("write")))[1].reward == 1.0
        assert pool.status().open_worlds == 0
        own = pool.containers.name().rpartition("-")[0].rpartition("-")[0]
        assert [name for name, *_ in await pool.containers.left() if name.startswith(own)] == []


@pytest.mark.parametrize("name", TABLES["on a shared grade"])
async def test_what_an_agent_breaks_is_graded_where_it_worked_too(harbor, name, tmp_path):
    (tmp_path / "write" / "task.toml").write_text("[verifier]\ntimeout_sec = 10\n")
    async with open_pool(harbor(grade="shared")) as pool:
        shown, grade = await played(pool, "write", TABLES["on a shared grade"][name])
        print(shown[-500:], grade)
        assert grade.ungradable
        assert (await played(pool, "write", await pool.expert("write")))[1].reward == 1.0


async def first_command_s(pool, number):
    """Seconds from an episode's slot to the answer to its first command; the episode lasts some seconds."""
    environment = await acquire(pool, str(number), "write")
    began = time.monotonic()
    try:
        await environment.start("write")
        await environment.step(pool.message("true"))
        seconds = time.monotonic() - began
        await environment.step(pool.message("sleep 4"))
        assert (await environment.grade()).reward == 0.0
        return seconds
    finally:
        await environment.close()


async def test_a_container_that_started_ahead_answers_sooner(harbor, capsys):
    async with open_pool(harbor(max_worlds=8)) as pool:
        seconds = await asyncio.gather(*(first_command_s(pool, number) for number in range(24)))
        cold, ahead = sorted(seconds[:8]), sorted(seconds[8:])
        with capsys.disabled():
            print(f"\nfirst command, eight at once: {cold[4]:.2f} s (median), {cold[-1]:.2f} s (longest)")
            print(f"the next sixteen, partly ahead: {ahead[8]:.2f} s (median), {ahead[-1]:.2f} s (longest)")
            print(f"of an episode: {pool.status().details['episode_mb']:.1f} MB")
        assert ahead[8] < cold[4]


async def test_files_survive_a_deadline_and_processes_do_not(harbor):
    commands = ["sleep 1000 & echo hello >/app/hello.txt; trap '' TERM INT; yes", "cat /proc/[0-9]*/comm; pwd"]
    async with open_pool(harbor()) as pool:
        shown, grade = await played(pool, "write", commands)
        after = shown.partition("all that ran is ended")[2].rpartition("</tool_response>\n<tool_response>")[2]
        assert grade.reward == 1.0
        assert ("yes\n" in after, "/app" in after) == (False, True)


async def test_a_container_that_the_host_removes_is_another_attempt(harbor):
    def remove(environment):
        subprocess.run(["podman", "rm", "-f", environment._names[0]], check=True, capture_output=True)

    async with open_pool(harbor()) as pool:
        with pytest.raises(EnvironmentCrashed):
            await played(pool, "write", ["true"], remove)
