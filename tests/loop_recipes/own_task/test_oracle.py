"""What a file says is right, and nothing, are played before anything is trained."""

import signal

import pytest

from agent_environments.tools import environment
from loop_formats.schema import ConfigError
from loop_recipes.own_task.oracle import spread
from loop_recipes.own_task.training import OwnTask
from loop_recipes.verbs.try_tasks import main
from support.in_process_tools import InProcessServer
from support.texts import texts_beside


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    before = signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(environment, "ForkServer", InProcessServer)
    yield
    signal.signal(signal.SIGALRM, before)


TEXTS = texts_beside(__file__)
REWARD = TEXTS["reward"]
CALCULATOR = TEXTS["calculator"]
GAME = TEXTS["game"]
SOLVED = "\ndef solve(task):\n    return {}\n"
CALLS = '[{"add": {"a": 1, "b": task["target"]}}, {"submit": {"x": task["target"], "note": "!"}}]'
NOTHING = "nothing:  doing nothing earns {} on average of 6 tasks"


def reward(parameters="answer, target", value="answer == str(target)", target="n"):
    return REWARD.format(parameters, value, target)


WELL = "the field target as the answer earns 1 on average of 6 tasks"
ZERO = "earns 0 on average of 6 tasks"
LOOK = "look at the reward, whose answer is a text (compare it with str(target))"
CURE = "write solve(task), which gives the agent's right turns"
FILES = {
    "a number as text": (reward(), WELL, 0),
    "a bool": (reward(value="answer.lower() == str(target).lower()", target="n % 2 == 0"), WELL, 0),
    "the text behind ####": (reward(value="answer[-1:] == target[-1:]", target='f"so\\n#### {n}"'), WELL, 0),
    "one of several": (
        reward(value="answer in target", target="[f'Paris {n}', 'x']"),
        f"the field target as the answer {ZERO}",
        0,
    ),
    "a number for a terminal tool": (reward() + CALCULATOR.format("int"), WELL, 0),
    "text for a terminal tool": (reward() + CALCULATOR.format("str"), WELL, 0),
    "two fields": (
        reward("answer, question, target"),
        "one of the fields question, target as the answer earns 1 on average of 6 tasks",
        0,
    ),
    "right turns in calls": (
        reward(value='answer == f"{target}!"') + CALCULATOR.format("int") + SOLVED.format(CALLS),
        "solve(task) earns 1 on average of 6 tasks",
        0,
    ),
    "a game that answers": (
        reward("instance", "instance.found") + GAME,
        "solve(task) earns 1 on average of 6 tasks",
        0,
    ),
    "another form": (
        reward(value='answer == f"<{target}>"'),
        f"the field target as the answer {ZERO}",
        0,
    ),
    "a reward that is upside down": (
        reward(value="answer != str(target)"),
        f"the field target as the answer {ZERO}",
        1,
    ),
    "solve is wrong": (reward() + SOLVED.format('"?"'), f"solve(task) {ZERO}", 0),
    "a part is wrong": (
        reward() + SOLVED.format('str(task["id"] % 5)'),
        "solve(task) earns 0.833 on average of 6 tasks; less than 1 on 1 of them, such as 5 (0)",
        0,
    ),
    "nothing to try": (
        reward("instance", "instance.found") + GAME.replace("def solve", "def other"),
        f"right answers could not be tried (0: no reward reads a field of the task that could be the answer); {CURE}",
        0,
    ),
    "some without": (
        reward(value='bool(answer) and answer == f"{target}"', target="n if n else None"),
        "the field target as the answer earns 1 on average of 5 of 6 tasks; 1 tasks could not be tried "
        "(0: no reward reads a field of the task that could be the answer)",
        0,
    ),
    "solve gives no turns": (
        reward() + SOLVED.format("3"),
        "right answers could not be tried (0: solve gives 3; a turn is a text, or a mapping of tool names to "
        f"arguments, and several stand in a list); {CURE}",
        0,
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_one_line_says_what_is_right_and_one_what_nothing_earns(tmp_path, name):
    source, right, nothing = FILES[name]
    (tmp_path / "mine.py").write_text(source)
    said = OwnTask.read(tmp_path / "mine.py").ask_oracle().lines
    assert said[0] == f"right:    {right}"
    assert said[1] == NOTHING.format(nothing)
    assert all(line.startswith("warning:  ") for line in said[2:])
    assert sum("nonsense" not in line for line in said[2:]) == (ZERO in right) + nothing


@pytest.mark.parametrize("value", ["answer == target", 'answer == f"<{target}>"'])
def test_the_cure_is_solve_where_a_field_is_not_the_right_answer(tmp_path, value):
    (tmp_path / "mine.py").write_text(reward(value=value))
    [*_, warning] = OwnTask.read(tmp_path / "mine.py").ask_oracle().lines
    assert warning == f"warning:  right answers should earn 1; {LOOK}, or {CURE}"


def test_right_turns_that_break_the_reward_are_told_in_its_place(tmp_path):
    (tmp_path / "mine.py").write_text(reward(value="int(answer or 7) == target") + SOLVED.format("'three'"))
    right, _, warning = OwnTask.read(tmp_path / "mine.py").ask_oracle().lines
    assert right == f"right:    solve(task) {ZERO}"
    assert warning.startswith("warning:  right answers should earn 1; reward right raised ValueError: invalid literal")


def test_a_training_whose_own_right_turns_earn_nothing_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text(reward(value="answer == target") + SOLVED.format("str(task['target'])"))
    with pytest.raises(ConfigError, match=r"mine.py: solve\(task\) earns 0 on all 6 tasks that were tried, so nothing"):
        OwnTask.read(tmp_path / "mine.py").check_reward()
    group = REWARD.replace("@reward", "@reward(group=True)").format("answers, target", "[0 for each in answers]", "n")
    for source in (group + SOLVED.format("'1'"), reward(value="answer == target")):
        (tmp_path / "mine.py").write_text(source)
        *_, warning = OwnTask.read(tmp_path / "mine.py").check_reward()
        assert warning.startswith("warning:  ")


def test_what_breaks_is_named_with_its_line(tmp_path):
    (tmp_path / "mine.py").write_text(reward(value='answer != "" and 1 / target > 0.0'))
    line, _, nonsense = OwnTask.read(tmp_path / "mine.py").ask_oracle().lines
    assert nonsense.startswith("warning:  a turn of nonsense earns something in 5 of 6 tasks, such as 1 (1), where it")
    assert (
        "earns 0.833 on average of 6 tasks; less than 1 on 1 of them, such as 0 (0); reward right raised Zero" in line
    )
    assert f"({tmp_path / 'mine.py'}:6) on task 0" in line
    (tmp_path / "mine.py").write_text(reward() + "\ndef solve(task):\n    return task['no such']\n")
    line, _ = OwnTask.read(tmp_path / "mine.py").ask_oracle().lines
    assert f"(0: solve raised KeyError: 'no such' ({tmp_path / 'mine.py'}:11))" in line


def test_a_helper_called_solve_or_a_tool_is_no_solution(tmp_path):
    for helper in (
        "def solve(a, b): ...",
        "solve = 3",
        "@tool(terminal=True)\ndef solve(x: str) -> str:\n    'Solve.'\n    return x",
    ):
        (tmp_path / "mine.py").write_text(f"{reward()}\n{helper}\n")
        assert OwnTask.read(tmp_path / "mine.py").module.solve is None


@pytest.mark.parametrize("drawn", ["random.random()", "uuid.uuid4().hex", "time.time_ns()"])
def test_tasks_that_differ_from_import_to_import_are_told(tmp_path, capsys, drawn):
    (tmp_path / "mine.py").write_text("import random, time, uuid\n" + reward(target=drawn))
    assert main([str(tmp_path / "mine.py")]) == 1
    assert "gives other tasks at each import: 6 of 6 differ" in capsys.readouterr().err


@pytest.mark.fault("ids that end in a number")
def test_groups_are_told(tmp_path, capsys):
    for group, said in (
        ("1", "all 6 tasks are one group by their field 'group', so none"),
        ("n // 3", "6 tasks in 2 groups"),
    ):
        (tmp_path / "mine.py").write_text(reward(target=f'n, "group": {group}'))
        assert main([str(tmp_path / "mine.py"), "--tasks", "1"]) == 0
        assert f"\ngroups:   {said}" in capsys.readouterr().out


def test_a_reward_that_breaks_with_nothing_done_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text(reward(value="int(answer) == target"))
    with pytest.raises(ConfigError, match=r"^reward right raised ValueError: .*, on task 0, with nothing"):
        OwnTask.read(tmp_path / "mine.py").ask_oracle()


@pytest.mark.parametrize(("body", "said"), TEXTS["a_reward_that_gives_no_grade_is_one_line_with_its_file"])
def test_a_reward_that_gives_no_grade_is_one_line_with_its_file(tmp_path, capfd, caplog, body, said):
    file = tmp_path / "mine.py"
    file.write_text("from agent_environments.protocol import Grade\n" + reward(value=body))
    assert main([str(file)]) == 1
    line = 7 if "1 / 0" in body else 5
    assert capfd.readouterr().err == f"loop try: reward right {said} ({file}:{line}), on task 0, with nothing done\n"
    assert not caplog.records


def test_tasks_are_spread_evenly():
    ids = [str(number) for number in range(10)]
    assert (spread(ids, 5), spread(ids, 3), spread(ids, 20)) == (["0", "2", "4", "6", "8"], ["0", "3", "6"], ids)
