"""`loop check` looks at the environment of a job: at what can be seen of it without opening it."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from loop_recipes.launch import job_check
from loop_recipes.launch.job_check import Report
from support.tool_modules import SUMS, write


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (None, None),
        (
            ("@tool\ndef add", "import sys; sys.exit(3)\n\n\n@tool\ndef add"),
            "mine.py cannot be imported: SystemExit: 3 (",
        ),
        (("@reward", ""), "there is no reward: write a function with @reward"),
        ("gone", "mine.py cannot be imported: FileNotFoundError"),
    ],
)
def test_a_module_of_tools_is_looked_at(tmp_path, change, problem):
    source = SUMS if change in (None, "gone") else SUMS.replace(*change)
    module = write(tmp_path, source)
    if change == "gone":
        Path(module).unlink()
    report = Report()
    tools = {"name": "tools", "options": {"module": module}}
    mixed = {"name": "mixed", "options": {"environments": {"sums": {"name": "tools", "module": module}}}}
    for section in (tools, mixed):
        job_check._environment(report, SimpleNamespace(environment=SimpleNamespace(**section)))
    assert [problem in line for line in report.problems] == ([True, True] if problem else [])


@pytest.mark.parametrize(
    ("options", "unopened", "problem"),
    [
        ({"python": sys.executable}, True, None),
        ({"python": "python3"}, True, None),
        ({"python": "/no/such/python"}, True, "node.environment.python: there is no interpreter at /no/such/python"),
    ],
)
def test_an_environment_that_was_not_opened_is_said(options, unopened, problem):
    report = Report()
    environment = SimpleNamespace(name="textcraft", options=options)
    job_check._environment(report, SimpleNamespace(environment=environment))
    assert report.unopened is unopened
    assert report.problems == ([problem] if problem else [])
