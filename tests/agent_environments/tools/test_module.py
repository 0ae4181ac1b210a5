"""What a user's module holds, its tasks and its reward; a mistake in it is one line."""

import json
import os
import sys
from pathlib import Path

import pytest

from agent_environments.protocol import Grade, UnknownTask, pool_class
from agent_environments.tools import reward
from agent_environments.tools.module import load_module
from agent_environments.tools.reward import together
from agent_environments.tools.tasks import read_tasks
from loop_plumbing.deadline import Raised
from support.texts import texts_beside
from support.tool_modules import COUNTER, SUMS, write

TABLES = texts_beside(__file__)


def test_the_parts_of_a_module(tmp_path):
    module = load_module(write(tmp_path, COUNTER))
    assert module.name == "mine"
    assert list(module.tools) == ["add", "hang", "power", "search", "leave", "process", "show"]
    assert module.instance_class.__name__ == "Counter"
    assert module.instructions == ""


def test_a_module_by_its_dotted_name(tmp_path, monkeypatch):
    write(tmp_path, SUMS, "sums_of_mine")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_module("sums_of_mine").name == "sums_of_mine"


@pytest.mark.parametrize(("change", "complaint"), TABLES["what_is_wrong_is_one_line"])
def test_what_is_wrong_is_one_line(tmp_path, change, complaint):
    source = COUNTER.replace(*change)
    assert source != COUNTER
    path = write(tmp_path, source)
    if complaint is None:
        load_module(path)
        return
    with pytest.raises(ValueError, match=complaint) as caught:
        load_module(path)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("line", "said"), TABLES["a_module_that_ends_the_interpreter_or_breaks_is_one_line"])
def test_a_module_that_ends_the_interpreter_or_breaks_is_one_line(tmp_path, line, said):
    path = write(tmp_path, f"# mine\n{line}\n", "ends")
    with pytest.raises(ValueError, match=rf"module {path} cannot be imported: {said} \({path}:2\)") as caught:
        load_module(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["import sys; sys.exit(3)", "1 / 0", "import no_such_package"])
def test_the_module_of_a_class_that_ends_the_interpreter_is_one_line(tmp_path, monkeypatch, line):
    write(tmp_path, line, "ends_too")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"environment 'ends_too:Mine' cannot be imported: .* \(.*ends_too.py:1\)"):
        pool_class("ends_too:Mine")


def test_a_module_that_is_not_there_and_a_method_outside_a_class(tmp_path):
    with pytest.raises(ValueError, match=r"module nowhere\.py cannot be imported: FileNotFoundError"):
        load_module("nowhere.py")
    source = SUMS.replace("def add(a: int,", "def add(self, a: int,")
    with pytest.raises(ValueError, match="add takes self, but is not a method of a class"):
        load_module(write(tmp_path, source))


@pytest.mark.fault("a tool or a reward that another decorator hid")
@pytest.mark.parametrize(("source", "complaint"), TABLES["what_another_decorator_hides_is_named"])
def test_what_another_decorator_hides_is_named(tmp_path, source, complaint):
    imports = "from functools import cache\nfrom agent_environments.tools import reply, reward, tool\n"
    with pytest.raises(ValueError, match=f": one is hidden by the decorator {complaint}$"):
        load_module(write(tmp_path, imports + source))


def test_jsonl_is_utf8_and_its_texts_may_hold_any_character(tmp_path):
    file = tmp_path / "tasks.jsonl"
    question = "Grüße\u2028and\u0085more"
    file.write_text(json.dumps({"question": question}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_tasks(str(file))["task1"]["question"] == question
    file.write_bytes(b'{"question": "\xff"}\n')
    with pytest.raises(ValueError, match=r"tasks\.jsonl is not UTF-8 \(byte 14\)") as caught:
        read_tasks(str(file))
    assert "\n" not in str(caught.value)


def test_tasks_from_jsonl(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(json.dumps({"question": str(n)}) for n in (1, 2)))
    table = read_tasks({"train": str(file), "test": [{"id": "x_1"}]})
    assert (table.split("train"), table.split("test")) == (["train1", "train2"], ["x_1"])
    assert table["train2"] == {"question": "2", "id": "train2"}
    assert read_tasks(file).split("train") == ["task1", "task2"]
    with pytest.raises(UnknownTask, match="no task 'train3'"):
        table["train3"]


@pytest.mark.parametrize(
    ("tasks", "complaint"),
    [
        (None, "there are no TASKS: write a list of mappings"),
        ([], "there are no tasks"),
        (["What?"], "task task1 must be a mapping, not 'What\\?'"),
        ([{"id": 7.5}], "task id 7.5 must be text, or a whole number"),
        ([{"id": ""}], "task id '' must be text"),
        ({"train": [{"id": "a_1"}], "dev": [{"id": "a_1"}]}, "there are two tasks 'a_1'"),
        ("nowhere.jsonl", "tasks cannot be read: .*nowhere.jsonl"),
        (
            {"question": "What?", "answer": "4"},
            r"^TASKS is a mapping, so .* that of 'question' is 'What\?', which is not a file; for one task write TASKS",
        ),
        ({"number": 7, "word": "x"}, "TASKS is a mapping, so .* that of 'number' is 7; for one task write"),
        ({"a": {"question": "What?"}}, "TASKS is a mapping, so .* that of 'a' is {'question': 'What"),
        ({"train": [{}], "dev": None}, "that of 'dev' is None; for one task write"),
        ({"train": "nowhere.jsonl"}, "that of 'train' is 'nowhere.jsonl', which is not a file"),
        ({"train": Path("nowhere.jsonl")}, "that of 'train' is .*nowhere.jsonl.*, which is not a file"),
        (Path("nowhere.jsonl"), "tasks cannot be read: nowhere.jsonl: "),
    ],
)
def test_bad_tasks_are_named(tasks, complaint):
    with pytest.raises(ValueError, match=complaint):
        read_tasks(tasks)


def test_groups_of_tasks_are_set_aside_and_always_the_same():
    def table():
        return read_tasks([{"id": f"{letter}_{number}", "group": letter} for letter in "abcdef" for number in (1, 2)])

    held, again = table(), table()
    for each in (held, again):
        each.hold_out(2)
    assert held.splits == ["train", "held_out"]
    assert (held.split("train"), held.split("held_out")) == (again.split("train"), again.split("held_out"))
    assert len(held.split("held_out")) == 4
    assert {task[0] for task in held.split("held_out")}.isdisjoint(task[0] for task in held.split("train"))
    assert sorted(held.split("train") + held.split("held_out")) == sorted(table().split("train"))
    for groups in (0, 6):
        with pytest.raises(ValueError, match=f"held_out is {groups}; of 6 groups of tasks it can be 1 to 5"):
            table().hold_out(groups)
    with pytest.raises(ValueError, match="held_out is for tasks without splits; there are dev"):
        read_tasks({"dev": [{"id": "a"}]}).hold_out(1)


EPISODE = {"answer": "4", "trajectory": [], "instance": None}


def test_what_a_reward_may_return(alarm):
    task = {"id": "a_1", "target": 4}

    def graded(function):
        one = reward(function)
        return together([(one, one.grade(task, **EPISODE))])

    assert graded(lambda answer, target: answer == str(target)) == Grade(1.0, True)
    assert graded(lambda instance: 0.25) == Grade(0.25, False)

    @reward
    async def own(target, bonus=0.0):
        return Grade(0.5 + bonus, True)

    assert own.grade(task, **EPISODE) == Grade(0.5, True)
    for bad in ("1", 2.0, float("nan"), None):
        with pytest.raises(ValueError, match="which is not a number"):
            reward(lambda bad=bad: bad).grade(task, **EPISODE)
    with pytest.raises(Raised, match="ZeroDivisionError"):
        reward(lambda target: target / 0).grade(task, **EPISODE)


def test_several_rewards_are_their_mean_by_weights_each_with_its_own_figure(alarm):
    @reward(weight=3.0)
    def right(answer, target):
        return answer == str(target)

    @reward(scale=(-1, 1), name="manners")
    async def polite():
        return 0.0

    @reward(weight=0)
    def characters(answer):
        return 17 * len(answer)

    everyone = (right, polite, characters)
    grade = together([(each, each.grade({"target": 4}, **EPISODE)) for each in everyone])
    assert (grade.reward, grade.success) == ((3.0 * 1.0 + 1.0 * 0.5) / 4.0, False)
    assert (grade.rewards, grade.metrics) == ({"right": 1.0, "manners": 0.0}, {"characters": 17.0})
    alone = together([(polite, polite.grade({}, **EPISODE))])
    assert (alone.reward, alone.rewards) == (0.5, {"manners": 0.0})
    with pytest.raises(ValueError, match="reward high returned 2, which is not a number from -1 to 1"):
        reward(scale=(-1, 1), name="high")(lambda: 2).grade({}, **EPISODE)


def test_a_reward_is_still_the_function():
    @reward
    def right(answer, target):
        return answer == target

    assert right("4", "4")
    with pytest.raises(ValueError, match="has no field 'target', which reward right asks for beside answer, traj"):
        right.check_task({"id": "a"})


@pytest.mark.fault("the grader of a moment ago")
def test_a_file_that_is_mended_at_once_and_at_the_same_length_is_the_mended_one(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    file, found = tmp_path / "mended.py", []
    for test in ("==", "!="):
        file.write_text(
            "from agent_environments.tools import reward\n"
            "TASKS = [{'id': 'a', 'question': 'b', 'target': 'c'}]\n"
            f"@reward\ndef right(answer, target):\n    return float(answer {test} target)\n"
        )
        os.utime(file, (1_000_000_000, 1_000_000_000))
        load_module(str(file))
        found.append(sys.modules["agent_environments.tools.own_folder.mended"].right("c", "c"))
    assert found == [1.0, 0.0]
