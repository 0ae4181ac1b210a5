"""Tasks as people bring them: ids of any form, groups, fields of any name, lines of any file."""

import json
import uuid

import pytest

from agent_environments.tools import environment
from agent_environments.tools.environment import ToolPool
from agent_environments.tools.module import load_module
from agent_environments.tools.tasks import read_tasks
from support.texts import texts_beside
from support.tool_modules import write

TABLES = texts_beside(__file__)

REWARD = "from agent_environments.tools import reward\n\n@reward\ndef right({}):\n    return True\n\n"
TASKS = 'TASKS = [{"id": i, "question": "?", "target": "x"} for i in IDS]\n'


def pool_of(tmp_path, ids, more="", **options):
    source = f"import uuid\n{REWARD.format('answer, target')}IDS = {ids}\n{TASKS}{more}"
    return ToolPool(lambda text: [], write(tmp_path, source), **options)


IDS = TABLES["ids"]


@pytest.mark.fault("ids that end in a number")
@pytest.mark.parametrize("ids", IDS)
def test_every_id_is_a_group_of_its_own(tmp_path, ids):
    pool = pool_of(tmp_path, ids)
    tasks = pool.tasks("train")
    assert [pool.description.group_of(task) for task in tasks] == tasks
    assert not pool.description.grouped
    assert {pool.description.environment_of(task) for task in tasks} == {""}
    assert len(pool_of(tmp_path, ids, held_out=len(tasks) // 3).tasks("held_out")) == len(tasks) // 3


@pytest.mark.fault("ids that end in a number")
def test_a_field_groups_tasks_and_a_split_never_divides_a_group(tmp_path):
    more = 'for number, task in enumerate(TASKS):\n    task["group"] = [None, 7, "seven", "other"][number % 4]\n'
    pool = pool_of(tmp_path, "range(40)", more)
    groups = {pool.description.group_of(task) for task in pool.tasks("train")}
    assert groups == {"7", "seven", "other", *(str(number) for number in range(0, 40, 4))}
    assert (pool.description.grouped, pool.description.groups) == (True, "groups of tasks")
    pool = pool_of(tmp_path, "range(40)", more, held_out=5)
    held_out = {pool.description.group_of(task) for task in pool.tasks("held_out")}
    assert len(held_out) == 5
    assert held_out.isdisjoint(map(pool.description.group_of, pool.tasks("train")))


@pytest.mark.fault("ids that end in a number")
@pytest.mark.parametrize("group", ["['a']", "''", "1.5", "True", "{}"])
def test_a_field_group_that_names_none_is_one_line(tmp_path, group):
    with pytest.raises(ValueError, match=r"task 0: its field 'group' names the group .* call the field otherwise"):
        pool_of(tmp_path, "[0]", f'TASKS[0]["group"] = {group}\n')


@pytest.mark.parametrize(("ids", "twice"), [('["a", "b", "a"]', "a"), ('[1, "1"]', "1")])
def test_an_id_that_is_there_twice_is_named(tmp_path, ids, twice):
    with pytest.raises(ValueError, match=f"there are two tasks '{twice}'"):
        pool_of(tmp_path, ids)


@pytest.mark.fault("ids that are no text")
def test_a_task_keeps_the_id_that_it_was_given():
    table = read_tasks([{"id": 7}, {"id": uuid.UUID(int=8)}, {}])
    assert table.split("train") == ["7", str(uuid.UUID(int=8)), "task3"]
    assert [task["id"] for task in table.all()] == [7, uuid.UUID(int=8), "task3"]


@pytest.mark.fault("a field named as a reward's parameter")
@pytest.mark.parametrize("field", ["answer", "trajectory", "instance", "judge"])
def test_a_field_that_the_episode_hides_is_refused_with_its_new_name(tmp_path, field):
    """GSM8K calls the right answer ``answer``, which is what the agent answered here."""
    tasks = f'TASKS = [{{"question": "?", "{field}": "42"}}]\n'
    file = write(tmp_path, REWARD.format(f"{field}, target='42'") + tasks)
    with pytest.raises(
        ValueError, match=f"task task1 has a field '{field}', but the '{field}' of reward right"
    ) as told:
        load_module(file)
    assert "\n" not in str(told.value)
    cure = str(told.value).partition("rename the field: ")[2].partition(", or for the lines")[0]
    module = load_module(write(tmp_path, REWARD.format(f"{field}, target") + tasks + cure + "\n"))
    assert module.tasks["task1"] == {"id": "task1", "question": "?", "target": "42"}


def test_a_field_that_no_reward_hides_stays(tmp_path):
    module = load_module(write(tmp_path, REWARD.format("instance") + 'TASKS = [{"question": "?", "answer": 3}]'))
    assert module.tasks["task1"]["answer"] == 3


LINE = json.dumps({"question": "2 + 2?", "target": "4"}).encode()


@pytest.mark.fault("empty lines in JSONL")
@pytest.mark.parametrize(
    "text",
    [
        LINE + b"\n\n" + LINE + b"\n\n\n",
        b"\xef\xbb\xbf" + LINE + b"\n" + LINE,
        b"\r\n" + LINE + b"\r\n  \r\n" + LINE + b"\r\n",
        b"\xef\xbb\xbf\n" + LINE + b"\n\t\n" + LINE + b"\n",
    ],
)
def test_empty_lines_and_a_byte_order_mark_are_no_tasks(tmp_path, text):
    (tmp_path / "tasks.jsonl").write_bytes(text)
    table = read_tasks(str(tmp_path / "tasks.jsonl"))
    assert table.split("train") == ["task1", "task2"]
    assert table["task2"]["target"] == "4"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"[\n" + LINE + b"\n]", r"tasks.jsonl:1 is not JSON: .*it must hold a task in each line"),
        (b"\n" + LINE + b"\n{", r"tasks.jsonl:3 is not JSON"),
        (b"\n\n", "there are no tasks"),
        (b"[" + LINE + b"]\n", "task task1 must be a mapping"),
    ],
)
def test_a_line_that_is_no_task_is_named(tmp_path, text, complaint):
    (tmp_path / "tasks.jsonl").write_bytes(text)
    with pytest.raises(ValueError, match=complaint):
        read_tasks(str(tmp_path / "tasks.jsonl"))


GAME = TABLES["game"]


@pytest.mark.fault("a question that is no text")
@pytest.mark.parametrize("question", ["['a', 'b']", "None", "3", "{'role': 'user'}"])
def test_a_question_that_is_no_text_is_refused(tmp_path, question):
    with pytest.raises(ValueError, match="task task1 has a 'question' that is not a text"):
        load_module(write(tmp_path, GAME % question))
    with pytest.raises(ValueError, match="task task1 has a 'question' that is not a text"):
        load_module(write(tmp_path, REWARD.format("answer") + f'TASKS = [{{"question": {question}}}]'))


@pytest.mark.parametrize(("text", "answer"), TABLES["an_answer_keeps_the_indentation_of_code"])
def test_an_answer_keeps_the_indentation_of_code(text, answer):
    assert environment.as_answer(text) == answer
