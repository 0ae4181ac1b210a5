"""Harness pools: who grades, which tasks there are, and how an episode of a program elsewhere is taken."""

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from agent_environments.counter import CounterPool
from agent_environments.harness.pool import HarnessPool
from agent_environments.program_protocol import Connection
from agent_environments.protocol import Grade, UnknownTask, acquire
from support.episodes import begun_episode
from support.places import check_who_waits_is_refused
from support.texts import texts_beside

TABLES = texts_beside(__file__)

TASKS = {"train": ["t_1", "t_2"]}
CONNECTION = Connection("http://127.0.0.1:1/v1", "sk-1", "c1.t_1.0", "c1", 0, 8)


def spans(text):
    return [(place, place + 1) for place in range(len(text))]


def pool(**options):
    return HarnessPool(spans, **{"tasks": TASKS, "accept_reward": True, **options})


def python(code):
    return ["{python}", "-c", code]


def reads(value):
    """A grader that gives 1 where the program has left this answer."""
    return python(
        "import json, os, pathlib; left = pathlib.Path(os.environ['EPISODE_FOLDER'], 'answer'); "
        f"print('hm'); print(json.dumps({{'reward': float(left.is_file() and left.read_text() == {value!r})}}))"
    )


async def played(harness_pool):
    environment = await harness_pool.acquire("e")
    assert await environment.start("t_1") == []
    try:
        await environment.run(CONNECTION)
        return await environment.grade()
    finally:
        await environment.close()
        await environment.close()
        assert harness_pool.status().open_worlds == 0


@pytest.mark.parametrize(("options", "why"), TABLES["a_config_without_a_grader_or_tasks_is_refused"])
def test_a_config_without_a_grader_or_tasks_is_refused(options, why):
    with pytest.raises(ValueError, match=why):
        pool(**options)


async def test_a_world_that_is_a_mixture_is_waited_for_before_the_episode_begins():
    counter = {"name": "counter", "max_worlds": 1}
    mixture = {"name": "mixed", "environments": {"one": counter, "two": counter}}
    mixed = pool(world=mixture, tasks=None, accept_reward=False)
    first = await acquire(mixed, "e1", "one/reach3_1")
    second = asyncio.create_task(acquire(mixed, "e2", "one/reach3_1"))
    other = await acquire(mixed, "e3", "two/reach3_1")
    assert not second.done()
    await first.close()
    for environment in (other, await second):
        await environment.close()
    assert mixed.status().open_worlds == 0


async def test_who_waits_for_a_place_is_refused_when_the_pool_closes():
    await check_who_waits_is_refused(pool(max_worlds=1))


def test_tasks():
    assert pool().tasks("train") == ["t_1", "t_2"]
    with pytest.raises(UnknownTask, match="there are train"):
        pool().tasks("dev")
    with pytest.raises(UnknownTask, match="no task 't_3'"):
        pool().check_tasks(["t_1", "t_3"])
    world = pool(world={"name": "counter"}, accept_reward=False)
    assert (world.dataset, world.tasks("train")[0]) == ("counter", "reach3_1")
    world.check_tasks(["reach3_1"])


async def test_a_grade_command_sees_what_the_program_left(tmp_path):
    program = python("import os; open('answer', 'w').write(os.environ['TASK_ID'] + os.environ['OPENAI_API_KEY'])")
    grader = reads("t_1sk-1")
    grade = await played(pool(command=program, grade_command=grader, accept_reward=False))
    assert (grade.reward, grade.success, grade.ungradable) == (1.0, True, None)


@pytest.mark.attack
@pytest.mark.fault("a grader is replaced, or told what to do, by the agent's own file")
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("command", TABLES["no_word_of_a_grade_command_is_looked_for_where_the_agent_writes"])
async def test_no_word_of_a_grade_command_is_looked_for_where_the_agent_writes(
    command, relative, tmp_path, monkeypatch
):
    """A grader that is not where the node starts, and every file by which the agent could take its place."""
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    for name in ("PATH", "PYTHONPATH", "NODE_PATH") if relative else ():
        monkeypatch.setenv(name, os.pathsep.join(["", ".", os.environ.get(name, "/nowhere"), "lib"]))
    agent = python(
        f"import os; files = {TABLES['what_an_agent_plants']!r}; os.makedirs('lib')\n"
        "for name in list(files): files['lib/' + name] = files[name]\n"
        "for name in files: open(name, 'w').write(files[name]); os.chmod(name, 0o755)"
    )
    made = pool(command=agent, grade_command=command.split("|"), accept_reward=False)
    grade = await played(made)
    assert (grade.reward, grade.success) == (0.0, False)


async def test_a_grader_finds_its_own_files_and_modules_where_the_node_starts(tmp_path, monkeypatch):
    (tmp_path / "neighbour.py").write_text("REWARD = 0.25")
    (tmp_path / "grade.py").write_text("import neighbour; print('{\"reward\": %s}' % neighbour.REWARD)")
    monkeypatch.chdir(tmp_path)
    for command in (["{python}", "grade.py"], ["sh", "-c", f"{sys.executable} -m grade"]):
        made = pool(command=["true"], grade_command=command, accept_reward=False)
        monkeypatch.chdir("/")
        assert (await played(made)).reward == 0.25
        monkeypatch.chdir(tmp_path)


@pytest.mark.attack
@pytest.mark.fault("a grader reads the right answer through the agent's link")
async def test_the_grader_of_the_page_reads_what_the_agent_wrote_and_follows_no_link(tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs/agents.md").read_text()
    (tmp_path / "grade.py").write_text(re.search(r"```python\n(# grade\.py.*?)```", page, re.DOTALL)[1])
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers/t_1.txt").write_text("42")
    monkeypatch.chdir(tmp_path)
    rewards = []
    for left in ("open('answer.txt', 'w').write('42\\n')", f"os.symlink('{tmp_path}/answers/t_1.txt', 'answer.txt')",
                 "os.mkfifo('answer.txt')", "open('answer.txt', 'wb').write(b'\\xff')", "os.mkdir('answer.txt')",
                 "open('answer.txt', 'w').truncate(1 << 40)"):  # fmt: skip
        agent = python(f"import os; {left}")
        grade = await played(pool(command=agent, grade_command=["{python}", "grade.py"], accept_reward=False))
        rewards.append((grade.reward, grade.ungradable))
    assert rewards == [(1.0, None)] + [(0.0, None)] * 5


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "print('well done')", "pass", "print('{\"reward\": null}')"])
async def test_a_grade_command_that_says_nothing_is_no_reward(code):
    grade = await played(pool(command=python("pass"), grade_command=python(code), accept_reward=False))
    assert grade.reward == 0.0
    assert "grade command" in grade.ungradable


async def test_a_text_beside_the_reward_may_hold_any_character():
    grader = python("import json; print(json.dumps({'reward': 1.0, 'why': 'one\\u2028two'}, ensure_ascii=False))")
    grade = await played(pool(command=python("pass"), grade_command=grader, accept_reward=False))
    assert grade.success


async def test_a_program_of_anthropics_clients_is_served_unless_it_brings_a_model_of_its_own():
    code = "import os; open('answer', 'w').write(os.environ['ANTHROPIC_BASE_URL'] + os.environ['ANTHROPIC_API_KEY'])"
    for variables, seen in (({}, "http://127.0.0.1:1sk-1"), ({"ANTHROPIC_API_KEY": "own"}, "http://127.0.0.1:1own")):
        made = pool(command=python(code), variables=variables, grade_command=reads(seen), accept_reward=False)
        assert (await played(made)).success


async def test_numbers_that_yaml_has_read_are_text():
    code = "import os, sys; open('answer', 'w').write(f'{os.environ[\"SEED\"]} {sys.argv[1]}')"
    options = {"command": [*python(code), 7], "variables": {"SEED": 1}, "grade_command": reads("1 7")}
    assert (await played(pool(**options, accept_reward=False))).success


async def test_a_program_that_cannot_be_started_has_no_reward():
    grade = await played(pool(command=["/nowhere/agent"]))
    assert "without a reward" in grade.ungradable


async def test_the_word_of_a_program_counts_only_where_the_config_says_so():
    for accepted in (True, False):
        options = {} if accepted else {"accept_reward": False, "grade_command": python("print(json)")}
        environment = await pool(command=python("pass"), **options).acquire("e")
        environment.finish(0.25)
        grade = await environment.grade()
        assert grade.reward == (0.25 if accepted else 0.0)
        await environment.close()


async def test_an_episode_waits_for_a_program_elsewhere_and_is_taken_once():
    elsewhere = pool()
    assert await elsewhere.take(None, 0.0) is None
    environments = [await elsewhere.acquire(str(number)) for number in range(2)]
    waiting = asyncio.create_task(elsewhere.take("t_2", 60.0))
    runs = []
    for environment, task in zip(environments, ("t_1", "t_2"), strict=True):
        await environment.start(task)
        runs.append(asyncio.create_task(environment.run(CONNECTION)))
    offer = await waiting
    assert (offer.task_id, offer.connection) == ("t_2", CONNECTION)
    assert await elsewhere.take("t_2", 0.0) is None
    offer.give_back()
    assert await elsewhere.take("t_2", 60.0) is offer
    environments[1].finish(1.0)
    await runs[1]
    assert (await environments[1].grade()).success
    runs[0].cancel()
    await asyncio.wait(runs)
    assert await elsewhere.take(None, 0.0) is None
    for environment in environments:
        await environment.close()


async def test_steps_go_to_the_world_and_its_grade_counts():
    environment = await pool(world={"name": "counter"}, accept_reward=False, command=["true"]).acquire("e")
    opening = await environment.start("reach3_1")
    assert "Bring the counter" in opening[-1].content
    assert (await environment.step("```python\nadd(3)\nfinish()\n```")).done
    assert (await environment.grade()).success
    await environment.close()


@pytest.mark.parametrize("key", ["command", "grade_command"])
async def test_a_program_that_is_not_there_is_named_before_any_episode(key):
    commands = {"command": python("pass"), "grade_command": python("pass"), key: ["/nowhere/agent"]}
    with pytest.raises(FileNotFoundError, match=f"{key} cannot be run: there is no program /nowhere/agent"):
        await pool(**commands, accept_reward=False).open()


@pytest.mark.fault("a misspelt file in a command")
@pytest.mark.parametrize("command", ["python3 -u NAME --steps 3", "bash ./NAME", "timeout 60 env A=1 {python} NAME"])
@pytest.mark.parametrize("key", ["command", "grade_command"])
def test_a_script_that_is_not_there_is_named_before_any_episode(tmp_path, monkeypatch, key, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_agent.py").touch()
    (tmp_path / "tasks/t_1").mkdir(parents=True)
    for name, task_files in (("my_agnet.py", None), ("my_agnet.py", "tasks"), ("/nowhere/my_agnet.py", None)):
        commands = {"command": python("pass"), "grade_command": ["true"], key: command.replace("NAME", name).split()}
        made = pool(**commands, tasks={"train": ["t_1"]}, task_files=task_files, accept_reward=False)
        with pytest.raises(
            FileNotFoundError, match=f"{key}: there is no file '.*my_agnet.py' here; did you mean 'my_a"
        ):
            made.preflight(["t_1"])


@pytest.mark.parametrize("command", ["{python} -m json", "env my_agent node", "true python x.py", "sh here.sh"])
def test_a_command_without_a_script_of_ours_is_taken(tmp_path, command):
    (tmp_path / "t_1").mkdir()
    (tmp_path / "t_1/here.sh").touch()
    pool(command=command.split(), tasks={"train": ["t_1"]}, task_files=str(tmp_path)).preflight(["t_1"])


async def test_files_that_a_command_names_are_those_of_the_nodes_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_agent.py").write_text("open('answer', 'w').write('42')")
    (tmp_path / "my_grader.py").write_text(reads("42")[-1])
    commands = {"command": ["{python}", "my_agent.py"], "grade_command": ["{python}", "./my_grader.py"]}
    assert (await played(pool(**commands, accept_reward=False))).success


def test_only_words_that_name_a_file_are_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("run", "tasks.json"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    code = "pass  # " + "as long as no file's name is " * 20
    words = ["run", "tasks.json", "./tasks.json", "folder", "./folder", "no_file.json", code]
    absolute = [str(tmp_path / name) for name in ("tasks.json", "tasks.json", "folder")]
    assert pool(command=words).starter.command == ["run", *absolute[:2], "folder", absolute[2], "no_file.json", code]


async def test_a_program_is_looked_for_where_its_own_variables_say(tmp_path):
    agent = tmp_path / "agent"
    agent.write_text("#!/bin/sh\n")
    agent.chmod(0o755)
    await pool(command=["agent"], variables={"PATH": str(tmp_path)}).open()


async def test_an_episode_without_a_folder_leaves_no_world(monkeypatch):
    harness_pool = pool(world={"name": "counter"}, accept_reward=False)

    def full(prefix):
        raise OSError("no space left on device")

    monkeypatch.setattr("agent_environments.harness.pool.tempfile.mkdtemp", full)
    with pytest.raises(OSError, match="no space"):
        await harness_pool.acquire("e")
    assert harness_pool._world.status().open_worlds == harness_pool.status().open_worlds == 0


class NamesItsParts(CounterPool):
    async def acquire(self, episode_id):
        environment = await super().acquire(episode_id)

        async def grade():
            return Grade(0.0, False, rewards={"correct": 0.0}, metrics={"steps": 3.0})

        environment.grade = grade
        return environment


async def test_a_programs_figures_take_no_name_that_the_grader_has():
    pool = HarnessPool(spans, ["true"], world={"name": f"{__name__}:NamesItsParts"})
    async with begun_episode(pool, "reach3_1") as environment:
        environment.finish(1.0, {"rewards": {"correct": 1.0, "own": 0.5}, "metrics": {"steps": 0.0}})
        grade = await environment.grade()
        assert (grade.rewards, grade.metrics) == ({"correct": 0.0, "own": 0.5}, {"steps": 3.0})
