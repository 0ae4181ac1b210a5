"""The workflows for continuous integration name commands that are there."""

import re
from pathlib import Path

import pytest
import yaml

CHECKOUT = Path(__file__).parents[1]
WORKFLOWS = sorted((CHECKOUT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_each_step_of_a_workflow_names_what_is_there(file):
    jobs = yaml.safe_load(file.read_text())["jobs"]
    lines = "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    targets = set(re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))
    assert {word for word in re.findall(r"\bmake ([a-z-]+)", lines)} <= targets
    assert all((CHECKOUT / script).is_file() for script in re.findall(r"\bbash (\S+)", lines))
    assert all("timeout-minutes" in job for job in jobs.values())


def test_there_are_workflows():
    assert WORKFLOWS
