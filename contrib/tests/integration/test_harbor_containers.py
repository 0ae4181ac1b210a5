"""Harbor's tasks in real containers: three tasks by nobody, by nonsense and by their solutions; attacks on the grade.

`tests/drills/harbor.sh` makes the image that HARBOR_IMAGE names, and runs this.
"""

import os
import subprocess

import pytest

from agent_environments.protocol import EnvironmentCrashed, create_pool
from loop_recipes.own_task.oracle import ask_oracle
from support.adapter_support import word_spans
from support.episodes import open_pool
from support.texts import texts_beside

TABLES = texts_beside(__file__)
pytestmark = [pytest.mark.attack, pytest.mark.integration, pytest.mark.drill]
SECRET = "the canary sings at noon"


@pytest.fixture
def harbor(tmp_path, monkeypatch):
    image = os.environ.get("HARBOR_IMAGE") or pytest.skip("tests/drills/harbor.sh makes an image, and runs this")
    monkeypatch.setenv("LOOP_SECRET", SECRET)
    for name, files in TABLES["tasks"].items():
        for file, text in {**TABLES["shared"], **files}.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(text.replace("IMAGE", image))
    return lambda: create_pool("harbor", {"tasks": str(tmp_path), "deadline_s": 15.0}, word_spans)


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


def test_nothing_and_nonsense_earn_0_and_the_solution_1(harbor):
    pool = harbor()
    oracle = ask_oracle(pool, False, lambda: pool.tasks("train"), 3)
    assert [played.grade.reward for played in oracle.nothing] == [0.0, 0.0, 0.0]
    assert list(oracle.nonsense.values()) == [0.0, 0.0, 0.0]
    assert list(oracle.right.values()) == [1.0, 1.0, 1.0], oracle


@pytest.mark.parametrize("name", TABLES["attacks"])
async def test_no_attack_is_paid_or_voids_its_episode(harbor, name):
    async with open_pool(harbor()) as pool:
        shown, grade = await played(pool, "write", TABLES["attacks"][name])
        print(shown[-2000:], grade)
        assert grade.reward == 0.0
        assert [word for word in (SECRET, "REACHED") if word in shown] == []
        assert (await played(pool, "write", await pool.expert("write")))[1].reward == 1.0
        assert pool.status().open_worlds == 0
        assert await pool.containers._named("loop-harbor") == []


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
