"""Commands and variables as YAML reads them."""

import re

import pytest

from agent_environments.program_config import variables, words


def test_numbers_are_the_text_that_was_meant():
    assert words("command", ["seq", 1, 2.5, True]) == ["seq", "1", "2.5", "true"]
    assert variables("variables", {"SEED": 1, "DEBUG": True, "RATE": 0.5, "NAME": "x", 7: "y"}) == {
        **{"SEED": "1", "DEBUG": "true", "RATE": "0.5", "NAME": "x", "7": "y"}
    }


@pytest.mark.parametrize(
    ("read", "value", "complaint"),
    [
        (words, "python my_agent.py", 'key must be a list of words: write ["python", "my_agent.py"], not'),
        (words, 3, "key must be a list of words, not 3"),
        (words, ["python", None], "key holds None, which is no text: put it in quotes"),
        (words, [["python"]], "key holds ['python'], which is no text"),
        (variables, ["A=1"], "key must be a mapping of names to texts, not ['A=1']"),
        (variables, {"A": None}, "key.A holds None, which is no text"),
        (variables, {"A": {"B": 1}}, "key.A holds {'B': 1}, which is no text"),
    ],
)
def test_anything_else_is_named(read, value, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        read("key", value)
    assert "\n" not in str(caught.value)
