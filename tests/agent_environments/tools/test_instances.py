"""A process for each episode, and its instance: what does not reach the next one, and what becomes of broken ones."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from agent_environments.protocol import EnvironmentCrashed, EnvironmentTimeout, Grade, Requirement
from agent_environments.tools.environment import ToolPool
from loop_plumbing.process_guard import descendants
from support.adapter_support import word_spans
from support.places import check_who_waits_is_refused
from support.tool_modules import COUNTER, call, write
from support.waiting import wait_until


@pytest.fixture
async def counters(tmp_path):
    pool = ToolPool(word_spans, write(tmp_path, COUNTER), max_worlds=16)
    await pool.open()
    yield pool
    await pool.close()


@pytest.fixture
async def one(tmp_path):
    """A pool of one instance, from a source that a test may change."""
    pools = []

    async def open_pool(source=COUNTER):
        pool = ToolPool(word_spans, write(tmp_path, source), max_worlds=1)
        pools.append(pool)
        await pool.open()
        return pool

    yield open_pool
    for pool in pools:
        await pool.close()


def lives(pid):
    return os.path.exists(f"/proc/{pid}")


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def pid_of(environment):
    return (await environment._lease.process()).pid


async def test_episodes_at_once_see_only_their_own_instance(counters):
    everybody = asyncio.Barrier(16)

    async def play(number):
        environment = await counters.acquire(str(number))
        messages = await environment.start(f"count{number}_1")
        assert messages[-1].content == f"The counter of count{number}_1 shows 0."
        for step in range(1, number + 1):
            result = await environment.step(call("add", amount=1))
            assert result.observation == f"<tool_response>\ncount{number}_1: {step}\n</tool_response>"
            await asyncio.sleep(0)
        await everybody.wait()
        assert counters.status().open_worlds == 16
        grade = await environment.grade()
        await environment.close()
        return grade.success

    assert all(await asyncio.gather(*(play(number) for number in range(16))))
    assert counters.status().open_worlds == 0


async def test_there_are_as_many_places_as_before_after_crashes_and_timeouts(counters):
    kinds = ["add", "hang", "cancelled", "crash", "leave"]

    async def play(number):
        kind = kinds[number % len(kinds)]
        environment = await counters.acquire(str(number))
        try:
            if kind == "crash":
                with pytest.raises(EnvironmentCrashed, match="RuntimeError: cannot be reset"):
                    await environment.start("broken_1")
                return
            await environment.start(f"count{number % 64}_1")
            if kind == "add":
                await environment.step(call("add", amount=number % 64))
                assert (await environment.grade()).success
            elif kind == "hang":
                with pytest.raises(EnvironmentTimeout, match=r"tool hang took longer than 0\.2 s"):
                    await environment.step(call("hang"))
                assert (await environment.grade()).reward in (0.0, 1.0)
            elif kind == "leave":
                assert (await environment.step(call("leave"))).done
                assert (await environment.grade()).ungradable
            else:
                step = asyncio.ensure_future(environment.step(call("hang")))
                await asyncio.sleep(0)
                step.cancel()
                await asyncio.gather(step, return_exceptions=True)
        finally:
            await environment.close()

    await asyncio.gather(*(play(number) for number in range(40)))
    assert counters.status().open_worlds == 0
    again = [await counters.acquire("again") for _ in range(16)]
    assert len({await pid_of(environment) for environment in again}) == 16
    for environment in again:
        await environment.close()


async def test_a_neighbour_plays_while_a_tool_holds_its_interpreter(tmp_path):
    """`(a+)+$` over a text of 60 letters would take years, and lets no other thread of its process run."""
    pool = ToolPool(word_spans, write(tmp_path, COUNTER), max_worlds=2)
    await pool.open()
    hanging, neighbour = await pool.acquire("hanging"), await pool.acquire("neighbour")
    await hanging.start("count1_1")
    await neighbour.start("count20_1")
    step = asyncio.create_task(hanging.step(call("search", pattern="(a+)+$", text="a" * 60 + "b")))
    for _ in range(20):
        await neighbour.step(call("add", amount=1))
    assert (await neighbour.grade()).success
    assert not step.done()
    step.cancel()
    await asyncio.wait([step])
    assert (await hanging.grade()).reward == 0.0, "a regular expression can be interrupted, and its instance graded"
    for environment in (hanging, neighbour):
        await environment.close()
    await pool.close()


async def test_a_stateful_call_that_is_late_is_graded_as_it_stands(one):
    pool = await one()
    environment = await pool.acquire("first")
    await environment.start("count3_1")
    await environment.step(call("add", amount=3))
    with pytest.raises(EnvironmentTimeout):
        await environment.step(call("hang"))
    assert (await environment.grade()).success
    before = await pid_of(environment)
    await environment.close()
    await wait_until(lambda: not lives(before))


async def test_work_that_cannot_be_interrupted_ends_with_its_process(one, monkeypatch):
    monkeypatch.setattr("loop_plumbing.forked_process.KILL_AFTER_S", 0.5)
    pool = await one()
    environment = await pool.acquire("first")
    await environment.start("count3_1")
    before = await pid_of(environment)
    with pytest.raises(EnvironmentTimeout, match=r"tool power took longer than 0\.2 s, and was ended"):
        await environment.step(call("power"))
    await wait_until(lambda: not lives(before))
    grade = await environment.grade()
    assert (grade.reward, grade.ungradable) == (0.0, "the instance is gone: a tool that was called ended its process")
    await environment.close()


async def test_a_call_that_ends_its_process_ends_the_episode(one):
    """It is the agent's doing: the episode is graded, and the next one has another process."""
    pool = await one()
    environment = await pool.acquire("first")
    await environment.start("count0_1")
    result = await environment.step(call("leave") + call("add", amount=1))
    assert (result.done, result.failed) == (True, True)
    assert result.observation == (
        "<tool_response>\nError: the tool failed: its process ended with status 3\n</tool_response>"
    )
    assert (await environment.grade()).ungradable
    await environment.close()
    environment = await pool.acquire("second")
    await environment.start("count0_1")
    assert (await environment.grade()).success
    await environment.close()


async def test_a_reward_that_needs_no_instance_grades_without_one(one):
    parts = ("def reached(instance: Counter, target: int)", "instance.value == target")
    pool = await one(COUNTER.replace(parts[0], "def reached(target: int)").replace(parts[1], "target == 1"))
    environment = await pool.acquire("first")
    await environment.start("count1_1")
    assert (await environment.step(call("leave"))).done
    assert (await environment.grade()).success
    await environment.close()


async def test_a_reward_that_takes_too_long_is_told(one, monkeypatch):
    source = COUNTER.replace(
        "-> bool:\n    return instance.value == target", "-> bool:\n    while True:\n        time.sleep(0.01)"
    )
    assert source != COUNTER
    source += "\nimport sys\nsys.modules['agent_environments.tools.reward'].DEADLINE_S = 0.1\n"
    monkeypatch.setattr(sys.modules["agent_environments.tools.reward"], "DEADLINE_S", 0.1)  # put back after it
    environment = await (await one(source)).acquire("first")
    await environment.start("count1_1")
    broke = (await environment.grade()).broke
    assert (broke.where, broke.what) == ("reward reached", "DeadlinePassed: took longer than 0.1 s")
    await environment.close()


async def test_a_reward_that_raises_is_told(one):
    pool = await one(COUNTER.replace("== target", "/ target"))
    environment = await pool.acquire("first")
    await environment.start("count0_1")
    grade = await environment.grade()
    assert (grade.reward, grade.broke.where) == (0.0, "reward reached")
    assert grade.ungradable == grade.broke.what
    assert re.fullmatch(r"ZeroDivisionError: .* \(.*mine\.py:\d+\)", grade.broke.what)
    await environment.close()
    assert pool.status().restarts == 0


async def test_an_instance_is_closed_with_its_episode_and_all_processes_with_the_pool(counters, tmp_path):
    environments = [await counters.acquire("open") for _ in range(2)]
    first, second = [await pid_of(environment) for environment in environments]
    await environments[0].close()
    assert (tmp_path / f"closed-{first}").exists()
    await counters.close()
    await wait_until(lambda: not lives(first) and not lives(second))
    await environments[1].close()
    assert counters.status().restarts == 0, "nothing takes the place of one in a closed pool"


async def test_who_waits_for_an_instance_is_refused_when_the_pool_closes(one):
    await check_who_waits_is_refused(await one())


async def test_an_instance_that_cannot_be_made_is_tried_again(one, tmp_path):
    making = '    def __init__(self):\n        if (FOLDER / "full").exists():\n            raise OSError("no room")\n\n'
    pool = await one(COUNTER.replace("    def reset", making + "    def reset", 1))
    (tmp_path / "full").touch()
    for _ in range(2):
        with pytest.raises(EnvironmentCrashed, match="could not be made: OSError: no room"):
            await pool.acquire("again")
    (tmp_path / "full").unlink()
    await (await pool.acquire("last")).close()
    assert pool.status().open_worlds == 0


async def test_the_end_of_the_server_is_no_doing_of_an_agents(one):
    """All processes end with it; the episodes are repeated, with a new server."""
    pool = await one()
    environment = await pool.acquire("first")
    await environment.start("count1_1")
    before = await pid_of(environment)
    os.kill(parent_of(before), signal.SIGKILL)
    await wait_until(lambda: not lives(before))
    with pytest.raises(EnvironmentCrashed, match="the tool server has ended"):
        await environment.step(call("add", amount=1))
    await environment.close()
    environment = await pool.acquire("second")
    await environment.start("count1_1")
    assert "count1_1: 1" in (await environment.step(call("add", amount=1))).observation
    await environment.close()


async def test_reset_may_be_async_and_call_its_parameter_what_it_likes(one):
    source = COUNTER.replace("    def reset(self, task):", "    async def reset(self, state):\n        task = state")
    environment = await (await one(source)).acquire("first")
    assert (await environment.start("count1_1"))[-1].content == "The counter of count1_1 shows 0."
    await environment.close()


CART = '''
from agent_environments.tools import reward, tool


class Cart:
    def reset(self, task):
        self.items = task["items"]
        return ", ".join(self.items)

    @tool
    def add(self, name: str) -> str:
        """Put something in."""
        self.items.append(name)
        return "There it is."


@reward
def holds(instance: Cart, items: list[str], wanted: list[str]) -> bool:
    return instance.items == items + [wanted.pop()]


TASKS = [{"id": "cart_1", "items": ["apple"], "wanted": ["pear"]}]
'''


async def test_no_episode_changes_its_task_for_the_next_one(one):
    """Neither an instance that goes on working on a list of the task's, nor a reward that takes it apart."""
    pool = await one(CART)
    for _ in range(2):
        environment = await pool.acquire("episode")
        assert (await environment.start("cart_1"))[-1].content == "apple"
        await environment.step(call("add", name="pear"))
        assert (await environment.grade()).success
        await environment.close()


GRADES = """
import numpy as np
from agent_environments.protocol import Grade, Requirement
from agent_environments.tools import reward, tool


@tool
def look() -> str:
    'Look.'


@reward
def right(answer):
    held = object() if answer == "object" else None
    return Grade(np.float32(0.25), np.bool_(False), (Requirement("one", np.bool_(True)),), tampered=held)


TASKS = [{"question": "?"}]
"""


async def test_a_grade_of_numpys_numbers_comes_as_pythons_own(one):
    pool = await one(GRADES)
    environment = await pool.acquire("first")
    await environment.start("train1")
    await environment.step("0.25")
    grade = await environment.grade()
    assert grade == Grade(0.25, False, (Requirement("one", True),))
    assert {type(grade.success), type(grade.requirements[0].passed)} == {bool}
    await environment.close()
    environment = await pool.acquire("second")
    await environment.start("train1")
    await environment.step("object")
    assert "Grade.tampered" in (await environment.grade()).ungradable
    await environment.close()


STATE = """
import asyncio, functools, logging, math, os, pathlib, random, signal, subprocess, sys, tempfile, threading, time

from agent_environments.tools import reward, tool

NOTES = []
SEEN = {}
LOOP = []


def default(key, known=[]):
    known.append(key)
    return len(known)


@functools.cache
def first_key(_):
    return os.getpid()


class Kept:
    attribute = ""


async def later():
    while True:
        await asyncio.sleep(0.001)
        SEEN["task"] = "it runs"


@tool
def leave(kind: str) -> str:
    "Leave something."
    match kind:
        case "list": NOTES.append("x")
        case "default argument": default("x")
        case "cache": first_key(0)
        case "class attribute": Kept.attribute = "x"
        case "global": globals()["MADE"] = "x"
        case "variable": os.environ["LEFT"] = "x"
        case "file": pathlib.Path("left").write_text("x")
        case "temporary file": pathlib.Path(tempfile.gettempdir(), "left").write_text("x")
        case "library": math.pi = 3
        case "module": sys.modules["left"] = sys
        case "signal": signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        case "descriptor": SEEN["descriptor"] = os.dup2(os.open("/dev/null", os.O_RDONLY), 200)
        case "thread": threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
        case "logger": logging.getLogger().addHandler(logging.NullHandler())
        case "folder": os.chdir("/")
    return find(kind)


@tool
def find(kind: str) -> str:
    "Find what is left."
    match kind:
        case "list": return str(NOTES)
        case "default argument": return str(default("y"))
        case "cache": return str(first_key.cache_info().currsize)
        case "class attribute": return Kept.attribute
        case "global": return globals().get("MADE", "")
        case "variable": return os.environ.get("LEFT", "")
        case "file": return " ".join(os.listdir())
        case "temporary file": return str(os.path.exists(os.path.join(tempfile.gettempdir(), "left")))
        case "library": return str(math.pi)
        case "module": return str("left" in sys.modules)
        case "signal": return str(signal.getsignal(signal.SIGUSR1))
        case "descriptor": return str(os.path.exists("/proc/self/fd/200"))
        case "thread": return str(threading.active_count())
        case "logger": return str(len(logging.getLogger().handlers))
        case "folder": return str(os.getcwd() == "/")


@tool
async def begin() -> str:
    "Begin a task in the background."
    SEEN["running"] = asyncio.ensure_future(later())
    await asyncio.sleep(0.05)
    return str(SEEN.get("task"))


@tool
async def begun() -> str:
    "What the task did."
    await asyncio.sleep(0.05)
    return str(SEEN.get("task"))


@tool
def programs() -> str:
    "Start a child, one in a session of its own, and one whose parent ends at once."
    pids = [subprocess.Popen(["sleep", "3600"], start_new_session=new).pid for new in (False, True)]
    shell = "setsid sleep 3600 >/dev/null 2>&1 & echo $!"
    pids.append(int(subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout))
    return " ".join(map(str, pids))


@tool
def where() -> str:
    "The folder, with something in it."
    os.makedirs("deep/down")
    pathlib.Path("deep/down/file").write_text("x")
    return os.getcwd()


@tool
def draw() -> str:
    "Draw a number."
    import numpy
    return f"{random.random()} {numpy.random.random()}"


@reward
def nothing(answer: str) -> float:
    return 0.0


import numpy
TASKS = [{"id": "t", "question": "?"}]
"""
KINDS = re.findall(r'case "([^"]*)": return', STATE)


async def observed(environment, name, **arguments):
    result = await environment.step(call(name, **arguments))
    return result.observation.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")


async def test_nothing_that_an_episode_leaves_reaches_the_next_one(one):
    pool = await one(STATE)
    assert len(KINDS) == 15

    async def found(*names):
        environment = await pool.acquire("episode")
        await environment.start("t")
        seen = [[await observed(environment, name, kind=kind) for kind in KINDS] for name in names]
        await environment.close()
        return [dict(zip(KINDS, each, strict=True)) for each in seen]

    (untouched,) = await found("find")
    left, kept = await found("leave", "find")
    assert [kind for kind in KINDS if left[kind] == untouched[kind]] == [], "each leaves something"
    assert {kind for kind in KINDS if left[kind] != kept[kind]} == {"default argument", "file"}, "and keeps it"
    assert await found("find") == [untouched]


async def test_tasks_programs_and_files_of_an_episode_end_with_it(one):
    pool = await one(STATE)
    first, second = await pool.acquire("first"), None
    await first.start("t")
    assert await observed(first, "begin") == await observed(first, "begun") == "it runs"
    pids = (await observed(first, "programs")).split()
    folder = await observed(first, "where")
    assert all(map(lives, pids))
    assert Path(folder, "deep", "down", "file").exists()  # noqa: ASYNC240
    await first.close()
    await wait_until(lambda: not any(map(lives, pids)) and not Path(folder).exists())
    second = await pool.acquire("second")
    await second.start("t")
    assert await observed(second, "begun") == "None"
    await second.close()


async def test_a_neighbours_programs_live_on(tmp_path):
    pool = ToolPool(word_spans, write(tmp_path, STATE), max_worlds=2)
    await pool.open()
    ending, going_on = await pool.acquire("ending"), await pool.acquire("going on")
    pids = []
    for environment in (ending, going_on):
        await environment.start("t")
        pids.append((await observed(environment, "programs")).split())
    await ending.close()
    await wait_until(lambda: not any(map(lives, pids[0])))
    assert all(map(lives, pids[1]))
    await going_on.close()
    await pool.close()


async def test_programs_of_a_process_that_ended_by_itself_end_too(one):
    pool = await one(STATE.replace('    return " ".join(map(str, pids))', "    os._exit(3)"))
    environment = await pool.acquire("first")
    await environment.start("t")
    server = parent_of(await pid_of(environment))
    assert "its process ended with status 3" in await observed(environment, "programs")
    await environment.close()
    await wait_until(lambda: not descendants(server))


async def test_each_episode_draws_its_own_numbers(one):
    pool = await one(STATE)
    drawn = []
    for _ in range(2):
        environment = await pool.acquire("episode")
        await environment.start("t")
        drawn.append((await observed(environment, "draw")).split())
        await environment.close()
    assert all(mine != other for mine, other in zip(*drawn, strict=True))


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
        environment = await pool.acquire("episode")
        await environment.start("count1_1")
        assert "count1_1: 1" in (await environment.step(call("add", amount=5))).observation
        await environment.close()
    assert (tmp_path / "made").read_text() == "x" * (1 if forkable else 4)


QUESTION = """
import datetime, functools, os, random, secrets, tempfile, time, uuid

from agent_environments.tools import reward

NAMES = {f"name{n}" for n in range(40)}


class Any_:
    pass


@reward
def right(answer: str, target=None) -> bool:
    return answer == str(target)


"""


@pytest.mark.parametrize(
    "tasks",
    [
        "[{'question': f'{n}?', 'target': random.random()} for n in range(3)]",
        "[{'id': str(n), 'question': f'{random.randrange(10**6)}?'} for n in range(3)]",
        "[{'question': name} for name in NAMES]",
        "[{'id': name, 'question': '?', 'others': list(NAMES)} for name in sorted(NAMES)]",
        "{'train': [{'question': str(time.time_ns())}], 'dev': [{'question': '?'}]}",
        "[{'question': '?', 'target': str(uuid.uuid4())}]",
        "[{'id': secrets.token_hex(4), 'question': '?'}]",
        "[{'question': '?', 'target': hash('a text')}]",
        "[{'question': '?', 'target': os.getpid()}]",
        "[{'question': datetime.datetime.now().isoformat()}]",
        "[{'question': '?', 'file': tempfile.mkdtemp()}]",
        "__import__('numpy') and [{'question': '?', 'target': __import__('numpy').random.randint(10**9)}]",
        "[{'question': '?'}] * random.Random().randrange(1) + [{'question': str(random.sample(range(10**6), 3))}]",
    ],
)
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
    environment = await (await one(source)).acquire("first")
    await environment.start("count1_1")
    seen = await observed(environment, "add", amount=1)
    assert "'words.txt' (an episode has a folder of its own: begin the path with Path(__file__).parent)" in seen
    await environment.close()
