"""The benchmark's own format, and what a critic may see."""

import json

import pytest

from agent_environments.protocol import UnknownTask
from loop_contrib.colbench.tasks import ColBenchTasks, read_tasks

LINE = {
    "problem_description": "Write a function double(x).",
    "ground_truth": "def double(x):\n    return 2 * x",
    "test_cases": {f"test{n}": f"double({n})" for n in range(10)},
}


def test_reads_the_benchmarks_lines(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(LINE) + "\n" + json.dumps({**LINE, "test_cases": ["double(7)"]}) + "\n")
    first, second = read_tasks(path, "train")
    assert (first.task_id, second.task_id) == ("train00001_1", "train00002_1")
    assert first.description == LINE["problem_description"]
    assert first.reference == LINE["ground_truth"]
    assert first.calls == tuple(f"double({n})" for n in range(10))
    assert second.calls == ("double(7)",)
    assert first.particulars == ()


@pytest.mark.parametrize(
    "line", ["[]", "{", json.dumps({**LINE, "test_cases": {}}), json.dumps({**LINE, "ground_truth": None})]
)
def test_a_line_that_is_no_task_is_named(tmp_path, line):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(LINE) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"train\.jsonl(, line |:)2 is no"):
        read_tasks(path, "train")


def test_a_missing_or_empty_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the tasks of split 'dev': .*none\.jsonl"):
        ColBenchTasks({"dev": str(tmp_path / "none.jsonl")})
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="holds no tasks"):
        ColBenchTasks({"dev": str(tmp_path / "empty.jsonl")})


def test_a_critic_is_told_the_code_and_of_known_tasks_only():
    tasks = ColBenchTasks(seed=0)
    task = tasks.splits["test"][0]
    assert tasks.hidden_information(task.task_id) == task.reference
    with pytest.raises(UnknownTask, match="no task 'nothing_1'"):
        tasks.hidden_information("nothing_1")
    with pytest.raises(UnknownTask, match="no split 'challenge' in ColBench; there are train, dev, test"):
        tasks.split("challenge")
