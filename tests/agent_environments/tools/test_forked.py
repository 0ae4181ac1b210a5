"""The process of an episode: what does not reach the next one, and tasks that must be the same at each import."""

import re
from pathlib import Path

import pytest

from agent_environments.protocol import EnvironmentCrashed
from agent_environments.tools.environment import ToolPool
from loop_plumbing.process_guard import descendants
from support.adapter_support import word_spans
from support.episodes import begun_episode, open_pool
from support.processes import exists, parent_of
from support.texts import texts_beside
from support.tool_modules import COUNTER, PRODUCTS, call, write
from support.waiting import wait_until

TEXTS = texts_beside(__file__)
STATE = TEXTS["state"]
LUCK = TEXTS["luck"]
LUCK_OF_TORCH = TEXTS["luck_of_torch"]
KINDS = re.findall(r'case "([^"]*)": return', STATE)


async def observed(environment, name, **arguments):
    result = await environment.step(call(name, **arguments))
    return result.observation.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")


async def test_nothing_that_an_episode_leaves_reaches_the_next_one(one):
    pool = await one(STATE)
    assert len(KINDS) == 15

    async def found(*names):
        async with begun_episode(pool, "t") as environment:
            seen = [[await observed(environment, name, kind=kind) for kind in KINDS] for name in names]
        return [dict(zip(KINDS, each, strict=True)) for each in seen]

    (untouched,) = await found("find")
    left, kept = await found("leave", "find")
    assert [kind for kind in KINDS if left[kind] == untouched[kind]] == [], "each leaves something"
    assert {kind for kind in KINDS if left[kind] != kept[kind]} == {"default argument", "file"}, "and keeps it"
    assert await found("find") == [untouched]


async def test_tasks_programs_and_files_of_an_episode_end_with_it(one):
    pool = await one(STATE)
    async with begun_episode(pool, "t", "first") as first:
        assert await observed(first, "begin") == await observed(first, "begun") == "it runs"
        pids = (await observed(first, "programs")).split()
        folder = await observed(first, "where")
        assert all(map(exists, pids))
        assert Path(folder, "deep", "down", "file").exists()  # noqa: ASYNC240
    await wait_until(lambda: not any(map(exists, pids)) and not Path(folder).exists())
    async with begun_episode(pool, "t", "second") as second:
        assert await observed(second, "begun") == "None"


async def test_a_neighbours_programs_live_on(tmp_path):
    async with open_pool(ToolPool(word_spans, write(tmp_path, STATE), max_worlds=2)) as pool:
        ending, going_on = await pool.acquire("ending"), await pool.acquire("going on")
        pids = []
        for environment in (ending, going_on):
            await environment.start("t")
            pids.append((await observed(environment, "programs")).split())
        await ending.close()
        await wait_until(lambda: not any(map(exists, pids[0])))
        assert all(map(exists, pids[1]))
        await going_on.close()


async def test_programs_of_a_process_that_ended_by_itself_end_too(one):
    pool = await one(STATE.replace('    return " ".join(map(str, pids))', "    os._exit(3)"))
    async with begun_episode(pool, "t") as environment:
        server = parent_of((await environment._lease.process()).pid)
        assert "its process ended with status 3" in await observed(environment, "programs")
    await wait_until(lambda: not descendants(server))


POOLS = f"""{PRODUCTS}
import concurrent.futures, functools, multiprocessing
import helper


def double(number):
    return 2 * number


@tool
def work(method: str) -> str:
    "Work in other processes."
    context = multiprocessing.get_context(method)
    with context.Pool(1, initializer=functools.partial(double, 0)) as pool:
        seen = pool.map(double, [1, 2]) + pool.map(helper.triple, [1])
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        seen.append(pool.submit(double, 2).result())
    queue = context.SimpleQueue()
    process = context.Process(target=helper.put, args=(queue, double(3)))
    process.start()
    return str([*seen, queue.get(), process.join()])
"""
HELPER = "def triple(number):\n    return 3 * number\n\n\ndef put(queue, value):\n    queue.put(value)\n"


@pytest.mark.slow
@pytest.mark.fault("a pool of processes in a tool")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
async def test_a_tool_has_a_pool_of_processes(one, tmp_path, method):
    (tmp_path / "helper.py").write_text(HELPER)
    async with begun_episode(await one(POOLS), "product2") as environment:
        assert await observed(environment, "work", method=method) == "[2, 4, 3, 4, 6, None]"


@pytest.mark.fault("random numbers of a module are the same in each episode")
@pytest.mark.parametrize("luck", [LUCK, pytest.param(LUCK_OF_TORCH, marks=pytest.mark.slow)])
async def test_each_episode_draws_its_own_numbers(one, luck):
    pool = await one(STATE + luck)
    drawn = []
    for _ in range(2):
        async with begun_episode(pool, "t") as environment:
            drawn.append((await observed(environment, "draw")).split())
    assert [number for number, (mine, other) in enumerate(zip(*drawn, strict=True)) if mine == other] == []


@pytest.mark.parametrize("forkable", [False, True])
async def test_an_instance_is_made_in_each_episode_or_once_before_them(one, tmp_path, forkable):
    making = f"""    forkable = {forkable}

    def __init__(self):
        with open(FOLDER / "made", "a") as file:
            file.write("x")
        self.made = []

"""
    source = COUNTER.replace("    def reset", making + "    def reset", 1).replace(
        "self.value += amount", "self.made.append(amount); self.value = len(self.made)"
    )
    pool = await one(source)
    for _ in range(3):
        async with begun_episode(pool, "count1_1") as environment:
            assert "count1_1: 1" in (await environment.step(call("add", amount=5))).observation
    assert (tmp_path / "made").read_text() == "x" * (1 if forkable else 4)


QUESTION = TEXTS["question"]


@pytest.mark.parametrize("tasks", TEXTS["tasks_that_are_others_at_each_import_are_refused"])
async def test_tasks_that_are_others_at_each_import_are_refused(one, tasks):
    with pytest.raises(
        EnvironmentCrashed, match=r"^mine gives other tasks at each import: \d+ of \d+ differ, the first is"
    ):
        await one(f"{QUESTION}TASKS = {tasks}\n")


async def test_tasks_that_are_the_same_at_each_import_may_hold_anything(one):
    values = ["NAMES", "Any_()", "Any_", "right", "functools.partial(min, 1)", "lambda: 1", "float('nan')", "b'x'"]
    values += ["__import__('numpy').arange(3)", "datetime.date(2020, 1, 1)", "random.Random(0).random()", "{1: {2, 3}}"]
    pool = await one(f"{QUESTION}TASKS = [{{'question': '?', 'target': each}} for each in [{', '.join(values)}]]\n")
    assert len(pool.tasks("train")) == len(values)


async def test_a_class_that_draws_its_tasks_is_refused(one):
    source = COUNTER.replace('"target": n}', '"target": random.random()}').replace("import os", "import os, random")
    with pytest.raises(EnvironmentCrashed, match="the first is 'count0_1'; draw them with a fixed seed"):
        await one(source)


async def test_a_relative_path_of_the_working_folder_is_told_the_cure(one, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("a\n")
    source = COUNTER.replace("        self.value += amount", "        open('words.txt')\n        self.value += amount")
    async with begun_episode(await one(source), "count1_1") as environment:
        seen = await observed(environment, "add", amount=1)
        assert "'words.txt' (an episode has a folder of its own: begin the path with Path(__file__).parent)" in seen


IMPORTED = TEXTS["imported"]


@pytest.mark.parametrize(("kind", "there"), [("", "false"), ("async ", "true")])
async def test_a_process_has_what_its_functions_need_before_the_fork(one, kind, there):
    """The less memory, the cheaper the fork; and 60 ms of importing asyncio are not paid in each episode."""
    pool = await one(IMPORTED.format(kind=kind))
    async with begun_episode(pool, "a") as environment:
        result = await environment.step(call("has", module="asyncio"))
        assert f"\n{there}\n" in result.observation
