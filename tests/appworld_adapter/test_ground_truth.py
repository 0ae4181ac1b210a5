"""Ground-truth solutions as turns: comments are thoughts, code comes without them."""

import ast

import pytest

from agent_environments.protocol import UnknownTask
from appworld_adapter.ground_truth import SolutionTurn, load_solution, solution_turns
from support.texts import texts_beside

TABLES = texts_beside(__file__)

SOURCE = TABLES["source"]


def test_each_statement_or_loop_is_a_turn_with_its_comments_as_thought():
    turns = solution_turns(SOURCE)
    assert [turn.thought for turn in turns] == [
        "",
        "Log in to the phone.\nthe phone number",
        "Look at every friend,\npage by page.\nbut not at me\nsend it",
        "",
    ]
    assert turns[0].code == "from datetime import date"
    assert turns[1].code == 'token = apis.phone.login(\n    username="a#b",\n    password="x",\n)["access_token"]'
    assert turns[2].code.splitlines()[0] == "for page in range(3):"
    assert turns[2].code.splitlines()[-1] == "        apis.phone.send(friend, text)"
    assert turns[3].code == "apis.supervisor.complete_task()"
    function = ast.parse(SOURCE).body[1]
    spoken = ast.parse("\n".join(turn.code for turn in turns[1:]))
    assert list(map(ast.dump, spoken.body)) == list(map(ast.dump, function.body[1:])), "the same program"


STRINGS = TABLES["strings"]


def test_strings_of_several_lines_stay_as_they_are():
    turns = solution_turns(STRINGS)
    function = ast.parse(STRINGS).body[0]
    assert [ast.dump(ast.parse(turn.code).body[0]) for turn in turns] == list(map(ast.dump, function.body))
    assert [turn.thought for turn in turns] == ["Write the note.\na comment", "its margin"]


def test_an_action_is_the_thought_and_one_block():
    assert SolutionTurn("Log in.", "x = 1").action == "Log in.\n```python\nx = 1\n```"
    assert SolutionTurn("", "x = 1").action == "```python\nx = 1\n```"


def test_what_is_no_solution_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no function solution"):
        solution_turns("x = 1\n")
    with pytest.raises(UnknownTask, match="only train and dev come with"):
        load_solution(tmp_path, "0a1b2c3_1")
