"""Answers run in the sandbox: what passes, what fails, and that nothing an answer does is more than a failed test."""

import contextlib
import sys
from unittest.mock import AsyncMock

import pytest

from agent_environments.protocol import EnvironmentCrashed
from agent_environments.sandbox import SANDBOX_FOLDER
from loop_contrib.colbench.grader import CodeGrader, GraderLimits, base_python, packages_of
from loop_contrib.colbench.task import ColBenchTask
from loop_plumbing.forked_process import ForkServer
from support.processes import write_program
from support.texts import texts_beside

TABLES = texts_beside(__file__)

LIMITS = GraderLimits(memory_mb=128, call_cpu_s=1.0, answer_timeout_s=300.0)
TWICE = "def f(x):\n    return 2 * x"


@contextlib.asynccontextmanager
async def grader_of(limits, python=None):
    grader = CodeGrader(python or base_python(), limits, "seccomp")
    await grader.open()
    try:
        yield grader
    finally:
        await grader.close()


@pytest.fixture
async def grader():
    async with grader_of(LIMITS) as grader:
        yield grader


def task_of(reference, *calls):
    return ColBenchTask(f"task{abs(hash((reference, calls)))}_1", "", reference, calls)


async def test_an_answer_is_compared_call_by_call(grader):
    task = task_of(TWICE, "f(0)", "f(1)", "f('a')", "f([1])")
    assert await grader.passed(task, "def f(x):\n    return x + x") == [True] * 4
    assert await grader.passed(task, "def f(x):\n    return 2.0 * x") == [True, True, False, False]
    assert await grader.passed(task, "def f(x):\n    return 0") == [True, False, False, False]
    assert await grader.passed(task, "def g(x):\n    return 2 * x") == [False] * 4


async def test_the_standard_library_is_there(grader):
    code = "import datetime, json, re\nfrom collections import Counter\ndef f(x):\n    return Counter(x).most_common(1)"
    assert await grader.passed(task_of(code, "f('abba')"), code) == [True]


async def test_packages_of_the_reference_are_there_under_a_python_that_has_them():
    """They are loaded before the process is sealed: with some C libraries no compiled one could be loaded later."""
    pytest.importorskip("numpy")
    code = "import numpy as np\nfrom numpy import linalg\ndef f(x):\n    return np.sum(x), linalg.norm(x), np.all(x)"
    plain = "def f(x):\n    return sum(x), sum(y * y for y in x) ** 0.5, all(x)"
    async with grader_of(LIMITS, sys.executable) as grader:
        for answer in (code, plain):
            assert await grader.passed(task_of(code, "f([3, 4])", "f([0])"), answer) == [True, True]


def test_the_packages_that_code_imports():
    code = "import os.path, numpy as np\nfrom . import near\ndef f():\n    from scipy.stats import norm"
    assert packages_of(code) == ["numpy", "scipy.stats", "scipy.stats.norm"]
    assert packages_of("for") == packages_of("x\x00") == []


async def test_a_package_that_starts_a_thread_is_named(tmp_path, monkeypatch):
    """The thread would not be sealed."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "threads.py").write_text("import threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()")
    python = write_program(tmp_path / "python", f'shift\nPYTHONPATH={folder} exec {sys.executable} "$@"')
    async with grader_of(LIMITS, str(python)) as grader:
        with pytest.raises(EnvironmentCrashed, match="one of threads starts a thread"):
            await grader.passed(task_of("import threads", "1"), TWICE)


async def test_where_the_reference_gives_no_value_no_answer_passes(grader, caplog):
    task = task_of("def f(x):\n    return 1 // x", "f(0)", "f(1)", "f(")
    for _ in range(2):
        assert await grader.passed(task, task.reference) == [False, True, False]
    complaint = "cannot be solved: its reference gives no value for 2 of 3 calls (SyntaxError, ZeroDivisionError)"
    assert [record.getMessage() for record in caplog.records] == [f"{task.task_id} {complaint}"]


async def test_a_reference_that_is_cut_short_condemns_no_answer(grader):
    task = task_of("import os\nos._exit(0)", "f(1)")
    for _ in range(2):
        with pytest.raises(EnvironmentCrashed, match=f"the reference of {task.task_id} did not end its calls"):
            await grader.passed(task, "def f(x): return 1")


async def test_every_call_begins_anew(grader):
    task = task_of("def f(x):\n    return x", "f(1)", "f(2)")
    counting = "seen = []\ndef f(x):\n    seen.append(x)\n    return seen[-1] if len(seen) == 1 else None"
    assert await grader.passed(task, counting) == [True, True]


PEEKING = TABLES["peeking"]


async def test_a_call_sees_no_other_call(grader):
    """A blind answer that could would find out from all of them together what it should have asked."""
    task = task_of("def f(x):\n    return 0", *(f"f({1000 + n})" for n in range(8)), "f(1012)", "f(1013)")
    passed = await grader.passed(task, PEEKING)
    assert passed == [True] * 8 + [False, True], "it finds its own, and no other"


async def test_a_call_that_ends_its_process_fails_alone(grader):
    code = "import os\ndef f(x):\n    return 2 * x if x else os._exit(0)"
    assert await grader.passed(task_of(TWICE, "f(0)", "f(1)"), code) == [False, True]


HOSTILE = [
    "for",
    "\ud800",
    "x\x00y",
    "(" * 5000,
    "def f(x): return f(x)",
    "def f(x):\n    while True: pass",
    "def f(x):\n    while True:\n        try:\n            while True: pass\n        except BaseException: pass",
    "def f(x): return [0] * 10**11",
    "def f(x): return 'y' * 10**8",
    "def f(x): return 10**10000",
    "def f(x):\n    y = []\n    y.append(y)\n    return y",
    "raise SystemExit",
    "import os\nos._exit(0)",
    "import os\nos.abort()",
    "import os\nfor fd in range(64):\n    try: os.write(fd, b'\\xff{\\n' * 100)\n    except OSError: pass",
    "import os\nos.close(3)\nos.closerange(0, 99)",
    "class Same:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x): return Same()",
    "class Number(int):\n    def __int__(self): raise KeyboardInterrupt\ndef f(x): return Number(3)",
]


async def test_a_hostile_answer_only_fails():
    async with grader_of(GraderLimits(memory_mb=128, call_cpu_s=0.2, answer_timeout_s=10.0)) as grader:
        for code in HOSTILE:
            assert await grader.passed(task_of(TWICE, "f(1)", "f(2)"), code) == [False, False], code


async def test_a_forged_line_is_the_answers_own_result(grader):
    """Code may write what it likes to the pipe: it is worth what returning the same would be."""
    forging = "import os\nos.write(3, b'{\"value\": 3}\\n')\ndef f(x): return 3"
    assert await grader.passed(task_of(TWICE, "f(1)", "f(2)"), forging) == [False, False]


async def test_an_answer_reaches_neither_files_nor_processes_nor_what_is_installed(grader):
    attempts = {
        "file": f"open({__file__!r}).read()",
        "sandbox": f"open({str(SANDBOX_FOLDER / 'sandbox.py')!r}).read()",
        "write": "open('/tmp/colbench-was-here', 'w')",
        "fork": "__import__('os').fork()",
        "socket": "__import__('socket').socket()",
        "run": "__import__('subprocess').run(['true'])",
        "project": "__import__('agent_environments')",
        "package": "__import__('pydantic')",
        "environment": "[][not __import__('os').environ.get('PYTEST_CURRENT_TEST')]",
    }
    code = "def f(x):\n    try:\n        eval(x)\n    except Exception:\n        return 'refused'\n    return 'through'"
    refused = "def f(x):\n    return 'refused'"
    task = task_of(refused, *(f"f({attempt!r})" for attempt in attempts.values()))
    assert dict(zip(attempts, await grader.passed(task, code), strict=True)) == dict.fromkeys(attempts, True)


async def test_numbers_are_equal_as_in_python_and_nan_is_itself(grader):
    task = task_of("def f(x):\n    return x", "f(1)", "f(float('nan'))", "f((1, {2: 3}))", "f({3, 1})", "f(1e300)")
    assert await grader.passed(task, "def f(x):\n    return True if x == 1 else x") == [True] * 5
    listed = "def f(x):\n    return list(x) if isinstance(x, tuple) else x"
    assert await grader.passed(task, listed) == [True, True, False, True, True]


@pytest.mark.parametrize(
    ("python", "why"), [("/no/python", "cannot start /no/python"), ("/bin/true", "it said nothing")]
)
async def test_no_interpreter_is_an_error_that_names_it(python, why):
    with pytest.raises(EnvironmentCrashed, match=rf"the grader \({python}\) server does not start: {why}"):
        await CodeGrader(python, LIMITS, "seccomp").open()


async def test_a_weaker_sandbox_than_asked_for_is_refused(monkeypatch):
    monkeypatch.setattr(ForkServer, "start", AsyncMock(return_value={"level": "rlimits"}))
    with pytest.raises(PermissionError, match="'rlimits', below sandbox_minimum 'seccomp'"):
        await CodeGrader(sys.executable, LIMITS, "seccomp").open()
    await CodeGrader(sys.executable, LIMITS, "rlimits").open()


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="sandbox_minimum is 'docker'"):
        CodeGrader(sys.executable, LIMITS, "docker")
    with pytest.raises(ValueError, match="times above 0"):
        GraderLimits(call_cpu_s=0)
