"""Folders of tasks, and episodes with a stand-in for podman; real containers are in tests/drills/harbor.sh."""

import asyncio
import json
import logging
import os
import re
import sys
from pathlib import Path

import pytest

from agent_environments.conformance import check_conformance
from agent_environments.protocol import EnvironmentCrashed, UnknownTask, create_pool
from agent_environments.shared_grade import SHARED_GRADE, refuse_shared_grade
from agent_environments.tool_calls import ToolCall, render_tool_call
from loop_contrib.harbor.containers import Containers
from loop_contrib.harbor.pool import reward_of
from loop_contrib.harbor.tasks import check_artifact, read_task
from support.adapter_support import word_spans
from support.episodes import open_pool
from support.texts import texts_beside
from support.waiting import wait_until

TABLES = texts_beside(__file__)
FAKE = Path(__file__).parents[3] / "tests" / "contrib_support" / "fake_podman.py"
pytestmark = pytest.mark.slow


def write_task(folder, **changed):
    """A task folder with some of its files changed; None leaves one out."""
    for name, text in {**TABLES["task"], **changed}.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


@pytest.fixture
def podman(tmp_path, monkeypatch):
    home = tmp_path / "podman"
    home.mkdir()
    command = tmp_path / "bin" / "podman"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {FAKE} "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_PODMAN", str(home))
    return home


@pytest.fixture
def harbor(tmp_path, podman):
    write_task(tmp_path / "tasks" / "hello")
    return lambda **options: create_pool("harbor", {"tasks": str(tmp_path / "tasks"), **options}, word_spans)


async def played(pool, *commands, before_grade=lambda: None):
    """The observations of an episode, and its grade."""
    environment = await pool.acquire("episode")
    try:
        await environment.start("hello")
        shown = []
        for command in commands:
            shown.append(await environment.step(render_tool_call(ToolCall("shell", {"command": command}))))
            if shown[-1].done:
                break
        before_grade()
        return shown, await environment.grade()
    finally:
        await environment.close()


@pytest.mark.parametrize("case", TABLES["refused"], ids=lambda case: case["says"])
def test_a_task_that_cannot_be_played_is_refused_in_one_line(tmp_path, case):
    folder = write_task(tmp_path / "bad", **case["files"])
    with pytest.raises(ValueError, match=re.escape(case["says"])) as raised:
        read_task(folder, {})
    assert "\n" not in str(raised.value)


def test_a_task_says_what_it_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "of the host")
    folder = write_task(tmp_path / "all", **{"task.toml": TABLES["whole"]})
    task = read_task(folder, {"NAMED": "told"})
    assert (task.network, task.memory_mb, task.cpus, task.user) == (False, 3072, 2, "agent")
    assert task.variables == {"A": "told", "B": "other"}
    assert task.artifacts == ("/app/out",)
    assert task.solution()[-1].endswith("KEY=value /solution/solve.sh")
    (folder / "environment" / "Dockerfile").write_text("FROM other\n")
    assert read_task(folder, {"NAMED": "told"}).digest("environment") != task.digest("tests")


@pytest.mark.parametrize("path", ["/", "/tests", "/logs/verifier", "/tests/x", "app", "/app/../tests", "/proc/1"])
def test_nothing_of_the_graders_own_is_an_artifact(path):
    with pytest.raises(ValueError, match="artifacts"):
        check_artifact(path)


@pytest.mark.parametrize("case", TABLES["rewards"], ids=str)
def test_rewards_of_tests(case):
    files = {name: text.encode() for name, text in case["files"].items()}
    if "says" in case:
        with pytest.raises(ValueError, match=case["says"]):
            reward_of(files)
    else:
        assert reward_of(files)["reward"] == case["reward"]


async def test_an_episode_keeps_its_shell_and_is_graded_in_another_container(harbor, podman, caplog):
    caplog.set_level(logging.INFO)
    async with open_pool(harbor(max_characters=100)) as pool:
        assert "podman build" in caplog.text
        shown, grade = await played(pool, "x=hello", "echo $x | tee hello.txt; false; (exit 3)", "seq 1000", "exit")
        said = [result.observation for result in shown]
        assert "(nothing was printed)" in said[0]
        assert "hello\n[exit status 3]" in said[1]
        assert "bytes are not shown" in said[2]
        assert "\n1000\n" in said[2]
        assert "the shell has ended" in said[3]
        assert grade.success
        assert [result.failed for result in shown] == [False, False, False, True]
        assert (await played(pool))[1].reward == 0.0
        turns = [pool.message(command) for command in await pool.expert("hello")]
        assert len(turns) == 2
        assert pool.status().open_worlds == 0
    runs = [line for line in (podman / "calls").read_text().splitlines() if line.startswith("run")]
    assert len(runs) == 4
    assert all("--network=none" in line and "--http-proxy=false" in line for line in runs)
    assert not os.listdir(podman / "containers")


async def test_a_command_ends_at_its_deadline_and_the_files_stay(harbor, podman):
    async with open_pool(harbor(deadline_s=1.0)) as pool:
        shown, grade = await played(pool, "echo hello > hello.txt; echo begun; while :; do :; done", "cat hello.txt")
        assert "begun" in shown[0].observation
        assert "longer than 1 s" in shown[0].observation
        assert "hello" in shown[1].observation
        assert grade.reward == 1.0
    assert "restart" in (podman / "calls").read_text()


async def test_who_ends_a_container_decides_between_a_grade_and_another_attempt(harbor, podman):
    end = "touch ../ended; exit 137"
    async with open_pool(harbor()) as pool:
        shown, grade = await played(pool, "echo hello > hello.txt", end, "echo never")
        assert len(shown) == 2
        assert shown[-1].done
        assert (grade.reward, grade.ungradable) == (0.0, "the agent ended its container")
        with pytest.raises(EnvironmentCrashed, match="no such container"):
            await played(pool, "rm -rf ../../*")
        with pytest.raises(EnvironmentCrashed, match="so it says"):
            await played(pool, "true", before_grade=lambda: (podman / "broken").write_text("inspect"))


@pytest.mark.fault("a container that somebody removes during the grade costs its agent the reward")
@pytest.mark.parametrize("stops", [1, 2])
async def test_a_container_that_is_removed_during_the_grade_is_another_attempt(harbor, podman, stops):
    async with open_pool(harbor()) as pool:
        with pytest.raises(EnvironmentCrashed, match="no such container"):
            await played(
                pool,
                "echo hello > hello.txt",
                before_grade=lambda: (podman / "removed").write_text("x" * stops),
            )


async def test_a_shared_grade_is_the_configs_alone_and_for_evaluation_alone(harbor, podman, tmp_path):
    task = tmp_path / "tasks" / "hello" / "task.toml"
    task.write_text('grade = "shared"\n[verifier]\nenvironment_mode = "shared"\n')
    for grade, shared in (("separate", 0), ("shared", 1)):
        async with open_pool(harbor(grade=grade)) as pool:
            assert (await played(pool, "echo hello > hello.txt"))[1].reward == 1.0
            assert (SHARED_GRADE in pool.dataset) == shared
        runs = [line for line in (podman / "calls").read_text().splitlines() if line.startswith("run")]
        assert len(runs) == 2 + shared
    with pytest.raises(ValueError, match="for `loop eval` alone"):
        refuse_shared_grade(pool.dataset)


async def test_what_an_agent_breaks_is_graded_where_it_worked_too(harbor, podman):
    async with open_pool(harbor(grade="shared")) as pool:
        _, grade = await played(pool, "true", before_grade=lambda: (podman / "broken").write_text("cp"))
        assert grade.ungradable == "podman cp: Error: so it says"


async def test_the_containers_of_the_next_episodes_start_while_others_run(harbor, podman):
    def containers():
        return sorted(os.listdir(podman / "containers"))

    async with open_pool(harbor(max_worlds=2)) as pool:
        first = [await pool.acquire_for(str(n), "hello") for n in range(2)]
        for environment in first:
            await environment.start("hello")
        waiting = [asyncio.create_task(pool.acquire_for(str(n), "hello")) for n in range(2, 5)]
        await wait_until(lambda: len(containers()) == 3)
        assert pool.status().waiting == 3
        ahead = (set(containers()) - {name for environment in first for name in environment._names}).pop()
        await first[0].close()
        next_one = await waiting[0]
        await next_one.start("hello")
        assert next_one._names == [ahead]
        assert (await next_one.grade()).reward == 0.0
        for task in waiting[1:]:
            task.cancel()
        await asyncio.gather(*waiting[1:], return_exceptions=True)
        assert containers() == sorted(next_one._names + first[1]._names)
        assert pool.status().details == {"episodes_per_core": 2 / len(os.sched_getaffinity(0))}
        await next_one.close()
        await first[1].close()
        assert containers() == []
        assert (pool.status().open_worlds, pool.status().waiting) == (0, 0)


async def test_what_is_left_is_bounded_and_a_link_leads_nowhere(harbor):
    async with open_pool(harbor(artifacts_mb=1)) as pool:
        _, grade = await played(pool, "echo hello > hello.txt; truncate -s 1G big")
        assert "more than 1 MiB" in grade.ungradable
        link = "mkdir ../tests; echo hello > ../tests/hello.txt; cd ..; rm -r app; ln -s tests app"
        assert (await played(pool, link))[
            1
        ].reward == 1.0  # its files are taken for those of /app, and for nothing else


async def test_containers_of_processes_that_are_gone_are_removed(harbor, podman):
    left = podman / "containers" / "loop-harbor-4194999-77-0-abc"
    own = podman / "containers" / f"{Containers('podman')._own}-9-abc"
    others = [podman / "containers" / name for name in TABLES["not ours"]]
    for folder in (left, own, *others):
        folder.mkdir(parents=True)
    async with open_pool(harbor()):
        assert (left.exists(), own.exists()) == (False, True)
    assert not own.exists()
    assert all(other.exists() for other in others)
    assert "--filter label=loop-harbor" in (podman / "calls").read_text()


async def test_it_conforms(harbor):
    async with open_pool(harbor()) as pool:
        await check_conformance(
            pool, "hello", ["", "no call", pool.message("exit"), pool.message("\ud800"), *TABLES["odd"]]
        )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"backend": "ssh"}, "must be podman or docker"),
        ({"tasks": "nowhere"}, "no folder nowhere"),
        ({"grade": "here"}, "separate or shared, not 'here'"),
    ],
)
def test_options_that_are_wrong(harbor, options, says):
    with pytest.raises(ValueError, match=says):
        harbor(**options)


async def test_a_back_end_that_is_missing_is_one_line(harbor, podman, monkeypatch):
    (podman / "broken").write_text("info build")
    pool = harbor()
    with pytest.raises(EnvironmentCrashed, match=r"podman does not work here: .*so it says \(apt-get install podman\)"):
        await pool.open()
    (podman / "broken").write_text("build")
    with pytest.raises(EnvironmentCrashed, match=r"task hello: its image .* cannot be had: Error: so it says"):
        await pool.open()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FileNotFoundError, match="there is no podman here: apt-get install podman"):
        pool.preflight("train")
    with pytest.raises(UnknownTask):
        pool.check_tasks(["other"])
    await pool.close()
    assert json.dumps(pool.description.identity)
