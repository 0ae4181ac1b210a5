"""`loop check` looks at the environment of a job: at what can be seen of it without opening it."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from loop_formats.schema import ConfigError
from loop_recipes.config.preflight import tasks_ahead
from loop_recipes.plan import job_check
from loop_recipes.plan.report import Problem, Report, ReportRow
from loop_recipes.verbs.check import main
from support.texts import texts_beside
from support.tool_modules import PRODUCTS, SUMS, write

TABLES = texts_beside(__file__)

TRAIN = SimpleNamespace(collection=SimpleNamespace(tasks=None, split="train"))


@pytest.mark.parametrize(("change", "problem"), TABLES["a_module_of_tools_is_looked_at"])
def test_a_module_of_tools_is_looked_at(tmp_path, change, problem):
    source = SUMS if change in (None, "gone") else SUMS.replace(*change)
    module = write(tmp_path, source)
    if change == "gone":
        Path(module).unlink()
    tools = {"name": "tools", "options": {"module": module}}
    mixed = {"name": "mixed", "options": {"environments": {"sums": {"name": "tools", "module": module}}}}
    for section in (tools, mixed):
        report = Report.of(job_check._environment(TRAIN, SimpleNamespace(environment=SimpleNamespace(**section))))
        assert [problem in line for line in report.problems] == ([True] if problem else [])


@pytest.mark.parametrize(
    ("options", "unopened", "problem"),
    [
        ({"python": sys.executable}, True, None),
        ({"python": "python3"}, True, None),
        ({"python": "/no/such/python"}, True, "node.environment.python: there is no interpreter at /no/such/python"),
    ],
)
def test_an_environment_that_was_not_opened_is_said(options, unopened, problem):
    environment = SimpleNamespace(name="textcraft", options=options)
    report = Report.of(job_check._environment(TRAIN, SimpleNamespace(environment=environment)))
    assert report.unopened is unopened
    assert report.problems == ((problem,) if problem else ())


@pytest.mark.parametrize(
    ("options", "max_context", "said"),
    [
        (
            {"agent_program": sys.executable},
            9_000,
            "max_context is 9000, and the agent's own prompt and its work need at",
        ),
        ({"agent_program": sys.executable}, 10_000, (["t_1"], "harness")),
        ({"agent_program": "/nowhere/codex"}, 10_000, "codex is not installed, .*npm install --global @openai/codex@"),
        ({"agent": "codecks"}, 10_000, "no agent is called 'codecks': did you mean 'codex'"),
        (
            {"agent": None, "agent_program": None, "command": ["/nowhere/agent"]},
            10_000,
            "command cannot be run: there is no program /nowhere/",
        ),
        ({"tasks": {"dev": ["t_1"]}}, 10_000, "collection.split: no split 'train'"),
    ],
)
def test_an_agent_is_looked_for_before_any_model_starts(tmp_path, options, max_context, said):
    (tmp_path / "t_1").mkdir()
    (tmp_path / "t_1/prompt.md").write_text("Mend it.")
    given = {"agent": "codex", "agent_program": sys.executable, "task_files": str(tmp_path)}
    given |= {"tasks": {"train": ["t_1"]}, "grade_command": ["true"]}
    node = SimpleNamespace(environment=SimpleNamespace(name="harness", options={**given, **options}))
    collection = SimpleNamespace(tasks=None, split="train", limits=SimpleNamespace(max_context=max_context))
    config = SimpleNamespace(collection=collection)
    if isinstance(said, tuple):
        assert tasks_ahead(config, node) == said[::-1]
    else:
        with pytest.raises(ConfigError, match=said):
            tasks_ahead(config, node)


@pytest.mark.parametrize(
    ("wanted", "split", "problems"), TABLES["a_split_that_a_file_of_functions_has_not_is_told_before_it_is_opened"]
)
def test_a_split_that_a_file_of_functions_has_not_is_told_before_it_is_opened(tmp_path, wanted, split, problems):
    (tmp_path / "mine.py").write_text(PRODUCTS)
    options = {"module": str(tmp_path / "mine.py")}
    node = SimpleNamespace(environment=SimpleNamespace(name="tools", options=options))
    limits = SimpleNamespace(max_context=1000)
    collection = SimpleNamespace(tasks=wanted, split=split, limits=limits, tasks_per_iteration=1, rollouts_per_task=2)
    report = Report.of(job_check._dataset(SimpleNamespace(collection=collection), node))
    assert (list(report.problems), report.unopened) == (problems, False)
    assert any(" tasks of " in line for line in report.lines) == (problems == [])


def test_a_world_that_has_to_be_opened_is_not_said_to_be_sound():
    options = {"command": ["true"], "world": {"name": "counter"}}
    node = SimpleNamespace(environment=SimpleNamespace(name="harness", options=options))
    collection = SimpleNamespace(tasks=None, split="train", limits=SimpleNamespace(max_context=1000))
    config = SimpleNamespace(collection=collection)
    assert tasks_ahead(config, node) is None
    report = Report.of(job_check._dataset(config, node))
    assert (report.unopened, report.problems) == (True, ())
    assert [line.split()[0] for line in report.lines] == ["environment"]


@pytest.mark.fault("loop check told a wrong length, and the misspelt agent only once that was mended")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("node.environment.prompt=tiny", ""),
        ("node.environment.promt=tiny", "loop check: node.environment: "),
        ("node.environment.name=appwrld", "loop check: node.environment: "),
        ("node.environment.name=harness", "loop check: node.environment: "),
    ],
)
def test_a_fault_of_the_environment_is_told_beside_one_of_the_config(change, said):
    with pytest.raises(SystemExit) as ended:
        main(["tiny_cpu", "collection.limits.max_context=90000", change])
    first, *others = str(ended.value).split("\n")
    assert first.startswith("loop check: collection.limits.max_context is 90000, more than")
    assert [line.startswith(said) for line in others] == [True] * bool(said)


def test_what_is_asked_twice_is_one_problem_where_it_was_found_first():
    """The checks of a run end at the first problem, and the plan asks of the model and of the tasks once more."""
    findings = [
        Problem("tasks", "no split"),
        ReportRow("run", "starts"),
        Problem("disk", "full"),
        Problem("tasks", "no split"),
    ]
    assert Report.of(findings) == Report((f"{'run':<15}starts",), ("no split", "full"), unopened=False)
