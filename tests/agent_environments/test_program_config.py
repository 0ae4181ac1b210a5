"""Commands and variables as YAML reads them."""

import re

import pytest

from agent_environments.program_config import variables, words


def test_whole_numbers_are_the_text_that_was_meant():
    assert words("command", ["seq", 1, -2]) == ["seq", "1", "-2"]
    assert variables("variables", {"SEED": 1, "NAME": "x", 7: "y"}) == {"SEED": "1", "NAME": "x", "7": "y"}


@pytest.mark.fault("a text that YAML took for a number")
@pytest.mark.parametrize(
    ("read", "value", "complaint"),
    [
        (words, "python my_agent.py", 'key must be a list of words: write ["python", "my_agent.py"], not'),
        (words, 3, "key must be a list of words, not 3"),
        (words, ["python", None], "key holds None, which is not a text: put quotes around what is meant"),
        (words, ["python", 1.1], "key holds 1.1, which is not a text"),
        (words, [["python"]], "key holds ['python'], which is not a text"),
        (variables, ["A=1"], "key must be a mapping of names to texts, not ['A=1']"),
        (variables, {"A": 1.1}, "key.A holds 1.1, which is not a text: put quotes around what is meant"),
        (variables, {"A": False}, "key.A holds False, which is not a text"),
        (variables, {True: "A"}, "key holds True, which is not a text"),
        (variables, {"A": None}, "key.A holds None, which is not a text"),
        (variables, {"A": {"B": 1}}, "key.A holds {'B': 1}, which is not a text"),
    ],
)
def test_anything_else_is_named(read, value, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        read("key", value)
    assert "\n" not in str(caught.value)
