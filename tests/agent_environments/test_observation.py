import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_environments.observation import REMINDER_HEAD, TRUNCATION_NOTE, observation, truncate

GOLDEN = Path(__file__).parent / "golden" / "observation.json"


def word_spans(text):
    """A token is a word, or a run of white space."""
    return [match.span() for match in re.finditer(r"\S+|\s+", text)]


def character_spans(text):
    return [(index, index + 1) for index in range(len(text))]


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()), ids=lambda case: case["name"])
def test_golden(case):
    assert observation(case["output"], case["reminder"], case["max_tokens"], word_spans) == case["observation"]


@given(st.text(alphabet="ab \n", max_size=300), st.integers(1, 50))
def test_truncation_cuts_at_a_line_then_at_a_space(output, max_tokens):
    shown = truncate(output, max_tokens, character_spans)
    if len(output) <= max_tokens:
        assert shown == output
        return
    head = shown.removesuffix(TRUNCATION_NOTE)
    assert shown == head + TRUNCATION_NOTE
    assert output.startswith(head)
    assert len(head) <= max_tokens
    window = output[:max_tokens]
    if "\n" in window[1:]:
        assert head == window[: window.rindex("\n")]
    elif " " in window[1:]:
        assert head == window[: window.rindex(" ")]
    else:
        assert head == window


def test_reminder_survives_any_output():
    reminder = "Task: do it"
    shown = observation("word " * 10_000, reminder, 3, word_spans)
    assert shown.endswith(REMINDER_HEAD + reminder)
    assert len(shown) < 200


def test_only_a_prefix_of_a_long_output_is_tokenized():
    seen = []

    def spans(text):
        seen.append(len(text))
        return word_spans(text)

    truncate("line of words\n" * 100_000, 20, spans)
    assert max(seen) < 10_000


def test_tokens_longer_than_the_window_are_found():
    output = "x" * 5_000 + " " + "y" * 5_000 + " z"
    assert truncate(output, 3, word_spans) == "x" * 5_000 + TRUNCATION_NOTE
    assert truncate(output, 5, word_spans) == output
