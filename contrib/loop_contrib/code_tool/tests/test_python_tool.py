"""Sessions of the tool ``python``: what ordinary code does in them, what bounds them, what an episode makes of them.

What attacks come to is in tests/integration/test_adapter_attacks.py, by AppWorld's own list.
"""

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import pytest

from agent_environments.protocol import EnvironmentCrashed
from agent_environments.tools.environment import ToolPool
from agent_environments.tools.tool import ToolError, WrongArguments
from loop_contrib.code_tool.python_tool import PythonSessions
from support.adapter_support import word_spans
from support.texts import texts_beside
from support.tool_modules import call, write
from support.waiting import wait_until

pytestmark = pytest.mark.slow


async def opened(limits="python"):
    sessions = PythonSessions(limits)
    try:
        await sessions.open()
    except ValueError as error:
        await sessions.close()
        if "Linux 6.2" in str(error):
            pytest.skip(str(error))
        raise
    return sessions


class Agent:
    """Calls the tools of one episode."""

    def __init__(self, sessions, **files):
        self.session = sessions.session()
        self.session.give(files)

    async def __call__(self, code):
        return (await self.session.tools[0].call({"code": code}, None)).strip()

    async def shell(self, command):
        return (await self.session.tools[1].call({"command": command}, None)).strip()


def no_box(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")


@pytest.fixture(params=["box", "seal"])
async def agent(request, monkeypatch):
    sealed = request.param == "seal"
    if sealed:
        no_box(monkeypatch)
    limits = {"tools": ["python"] if sealed else ["python", "shell"], "folder_mb": 1, "memory_mb": 128, "deadline_s": 1}
    sessions = await opened(limits)
    agent = Agent(sessions, **{"data/prices.csv": "name,price\nnut,3\nbolt,4\n"})
    agent.sealed = sealed
    yield agent
    await agent.session.close()
    await sessions.close()


def boxed_only(agent):
    if agent.sealed:
        pytest.skip("of a box")


ORDINARY, MEANT, FILLING, LIES, TABLES = texts_beside(__file__).values()


NOT_SEALED = {"glob", "os.walk", "shutil", "tempfile"}
"""A sealed interpreter may not ask about a folder's files: it raises, and gives no empty answer."""


@pytest.mark.parametrize("name", ORDINARY)
async def test_ordinary_code(agent, name):
    code, shown = ORDINARY[name]
    said = await agent(code)
    if agent.sealed and name in NOT_SEALED:
        assert "Traceback" in said
        assert "NotImplementedError: a sealed interpreter" in said or "PermissionError" in said
    else:
        assert said == shown


@pytest.mark.parametrize(
    ("before", "code", "last"),
    [pytest.param(*rest, marks=pytest.mark.fault(kind), id=name) for name, (kind, *rest) in MEANT.items()],
)
async def test_python_is_python(before, code, last):
    sessions = await opened()
    agent = Agent(sessions)
    await agent(before)
    assert (await agent(code)).endswith(last)
    await agent.session.close()
    await sessions.close()


async def test_variables_stay_and_an_error_is_shown_with_its_lines(agent):
    await agent("def half(x):\n    return x / n")
    assert await agent("half(1)") == (
        'Traceback (most recent call last):\n  File "<call 2>", line 1, in <module>\n    half(1)\n'
        "  File \"<call 1>\", line 2, in half\n    return x / n\n               ^\nNameError: name 'n' is not defined"
    )
    await agent("n = 2")
    assert await agent("half(1)") == "0.5"
    assert (await agent("if x")).endswith("SyntaxError: expected ':'")
    assert await agent("raise SystemExit(3)") == "SystemExit: 3"


async def test_what_is_printed_is_bounded_and_a_call_in_time_is_interrupted(agent):
    shown = await agent("while True: print('x' * 1000)")
    assert (len(shown) <= 2048, shown[:9], shown.splitlines()[-1]) == (
        *(True, "x" * 9),
        "TimeoutError: the code took longer than 1 s",
    )
    assert await agent("n = 5\nimport time; time.sleep(100)") == "TimeoutError: the code took longer than 1 s"
    assert await agent("n") == "5"


async def test_a_session_that_ended_is_told_and_its_files_stay(agent):
    await agent("n = 1\nopen('kept', 'w').write('yes')")
    with pytest.raises(ToolError, match="status 3; variables are gone, files are kept"):
        await agent("import os; os._exit(3)")
    assert "NameError" in await agent("n")
    assert await agent("open('kept').read()") == "'yes'"
    assert (await agent.session.left_files())["kept"] == b"yes"


async def again_and_again(agent, code):
    for _ in range(60):  # a call is interrupted after a second
        await agent(code)


@pytest.mark.parametrize("name", FILLING)
async def test_files_are_bounded_together(agent, name):
    if agent.sealed:
        with pytest.raises(ToolError, match="variables and files are gone"):
            await again_and_again(agent, FILLING[name])
        assert await agent("import os\nos.listdir('.')") == "['data']"
        return
    shown = await agent(FILLING[name]) + await agent("open('one more', 'wb').write(bytes(2**20))")
    assert "No space left on device" in shown
    used, files = (int(line.split()[2]) for line in (await agent.shell("df -k /box; df -i /box")).splitlines()[1::2])
    assert used <= 1024
    assert files <= 1000


async def test_memory_is_bounded(agent):
    assert (await agent("x = bytearray(10**9)")).endswith("MemoryError")


@pytest.mark.parametrize("lie", LIES)
async def test_an_answer_that_code_forges_deceives_its_own_session_alone(agent, lie):
    forging = f"import os\nfor d in range(3, 300):\n    try: os.write(d, {LIES[lie]})\n    except OSError: pass"
    with contextlib.suppress(ToolError):
        await agent(forging)
    assert "2" in [await agent("1 + 1") for _ in range(4)]
    assert (await agent.session.left_files()).keys() == {"data/prices.csv"}


async def test_sessions_are_apart_and_leave_nothing(monkeypatch):
    no_box(monkeypatch)
    sessions = await opened()
    one, two = Agent(sessions, x="1"), Agent(sessions, x="2")
    assert await asyncio.gather(one("open('x').read()"), two("open('x').read()")) == ["'1'", "'2'"]
    folders = [Path(await each("import os\nprint(os.environ['HOME'])")) for each in (one, two)]
    assert "PermissionError" in await one(f"open({str(folders[1] / 'x')!r}).read()")
    assert "PermissionError" in await one(f"import os; os.listdir({str(folders[0].parent)!r})")
    assert await Agent(sessions, x="3").session.left_files() == {"x": b"3"}, "one that never began"
    for each in (one, two):
        await each.session.close()
    await wait_until(lambda: not any(folder.exists() for folder in folders))
    await sessions.close()
    await asyncio.sleep(0)
    assert not folders[0].parent.exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("ruby", "say `code: python`, `code: shell`, or a mapping"),
        ({"tools": ["ruby"]}, r"code.tools must be of python, shell, not \['ruby'\]"),
        ({"memory": 1}, r"unknown key 'code.memory'; did you mean 'memory_mb'\?"),
        ({"deadline_s": 0}, "^code.deadline_s, memory_mb, folder_mb and max_characters must be above 0"),
        ({"packages": "numpy"}, r"code.packages must be a list, not 'numpy'"),
        ({"memory_mb": "much"}, "code.memory_mb must be int, not 'much'"),
    ],
)
async def test_a_wrong_section_is_one_line(given, words):
    with pytest.raises(ValueError, match=words):
        PythonSessions(given)


async def test_a_package_that_is_missing_is_said_before_anything_starts():
    sessions = PythonSessions({"packages": ["no_such_package"]})
    with pytest.raises(
        ValueError,
        match=r"^code: the code server does not start: .*No module named 'no_such_package'",
    ):
        await sessions.open()
    await sessions.close()


async def test_a_package_with_compiled_code_is_used():
    sessions = await opened({"packages": ["numpy"], "python": sys.executable, "memory_mb": 512})
    agent = Agent(sessions)
    assert await agent("import numpy\nint(numpy.arange(5).sum())") == "10"
    assert await agent("int(numpy.random.default_rng(0).integers(9)), len(numpy.fft.fft([1, 2, 3]))") == "(7, 3)"
    assert "No module named 'torch'" in await agent("import torch")
    await agent.session.close()
    await sessions.close()


async def test_an_episode_is_graded_by_the_files_that_it_left(tmp_path):
    pool = ToolPool(word_spans, write(tmp_path, TABLES), code="python", max_worlds=2)
    try:
        await pool.open()
        environment = await pool.acquire("episode")
        opening = await environment.start("t2")
        assert '"name": "python"' in opening[0].content
        code = "total = sum(int(line) for line in open('p.csv'))\nopen('total.txt', 'w').write(f'{total}')"
        step = await environment.step(call("python", code=code))
        assert ("1" in step.observation, step.failed, step.tools[0].tool) == (True, False, "python")
        step = await environment.step(call("python", cod="1"))
        assert "wrong arguments for python: it takes one argument, code, a text" in step.observation
        assert (await environment.step(call("done"))).done
        assert (await environment.grade()).reward == 1.0
        await environment.close()

        environment = await pool.acquire("another")
        await environment.start("t2")
        await environment.step(call("done"))
        assert (await environment.grade()).reward == 0.0
        await environment.close()
    finally:
        await pool.close()


async def played(environment, *calls):
    return [(await environment.step(each)).observation.removeprefix("<tool_response>\n") for each in calls]


@pytest.mark.parametrize("boxed", [True, False])
async def test_functions_of_the_file_see_the_folder_and_change_it(tmp_path, monkeypatch, boxed):
    if not boxed:
        if sys.prefix == sys.base_prefix:
            pytest.skip("a sealed interpreter could read what this one imports")
        monkeypatch.setenv("PATH", str(tmp_path))
    pool = ToolPool(word_spans, write(tmp_path, TABLES), code={"folder_mb": 1}, max_worlds=2)
    try:
        await pool.open()
        environment = await pool.acquire("episode")
        opening = await environment.start("t2")
        assert "code_folder" not in opening[0].content
        look = call("python", code="import os\nopen('p.csv').read(), sorted(os.listdir('.'))")
        seen = await played(environment, call("add", line="5"), look, call("add", line="0"), look)
        assert [text.splitlines()[0] for text in seen] == [
            "new/5 p.csv",
            "('2\\n4\\n5\\n', ['new', 'p.csv'])",
            "new/5 p.csv",
            "('2\\n4\\n5\\n0\\n', ['new', 'p.csv'])",
        ]
        links = "os.symlink('/', 'new'); os.symlink('/etc/passwd', 'p.csv')" if boxed else "os.mkdir('p.csv')"
        hostile = f"import os\nos.rename('new', 'old'); os.remove('p.csv'); {links}"
        seen = await played(
            environment,
            *(call("python", code=hostile), call("add", line="6"), call("change", name="p.csv", size=3), look),
            *(call("change", name=name, size=3) for name in ("../x", "/etc/x", "", ".", "a//b", "a\0b", "old")),
            *(call("change", name="old"), call("change", name="big", size=2 << 20)),
        )
        taken = "new/6" if boxed else "p.csv"
        assert f"Error: the tool failed: the working folder does not take {taken}: " in seen[1]
        assert not boxed or "'\\x00\\x00\\x00'" in seen[3]
        assert all("must be bytes, by a path within the folder" in text for text in [*seen[4:10], seen[11]])
        assert "the working folder does not take old" in seen[10]
        assert not boxed or "the working folder does not take big: No space left" in seen[12]
        assert "root" not in "".join(seen)
        await environment.close()
    finally:
        await pool.close()


async def test_a_session_whose_server_is_gone_repeats_the_attempt(agent):
    await agent("1")
    agent.session._server.kill()
    with pytest.raises(EnvironmentCrashed, match="the code server has ended"):
        await agent("while True: pass")


async def test_a_tool_takes_code_and_nothing_else(agent):
    for arguments in ({}, {"code": 3}, {"code": "1", "x": 2}):
        with pytest.raises(WrongArguments):
            await agent.session.tools[0].call(arguments, None)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["a"], "must map the names of files to their text"),
        ({"/etc/x": "a"}, "a path within the session's folder"),
        ({"../x": "a"}, "a path within the session's folder"),
        ({"": "a"}, "a path within the session's folder"),
        ({"x": 3}, "must be text, not int"),
        ({"x": "a" * 2**21}, "take more than 1 MiB: raise code.folder_mb"),
        ({"x": "a" * 2**20}, "take more than 1 MiB: raise code.folder_mb"),
    ],
)
async def test_files_that_cannot_be_given_are_refused_with_the_task(tmp_path, files, words):
    source = TABLES.replace('{"p.csv": f"{n}\\n4\\n"}', json.dumps(files))
    assert source != TABLES
    with pytest.raises(ValueError, match=f"task t0: its .*{words}"):
        ToolPool(word_spans, write(tmp_path, source), code={"folder_mb": 1})


async def test_a_reward_that_reads_the_folder_asks_for_the_tool(tmp_path):
    with pytest.raises(ValueError, match=r"tool add reads code_folder: say `code: python`"):
        ToolPool(word_spans, write(tmp_path, TABLES))
