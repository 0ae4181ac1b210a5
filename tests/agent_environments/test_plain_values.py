"""Every field of what an environment hands over: made plain, or refused by name; what is plain can be written down."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from agent_environments.plain_values import plain_grade, plain_messages, plain_result
from agent_environments.protocol import Broke, Grade, Message, Requirement, StepResult, ToolUse
from support.void_kinds import MADE_PLAIN, MADE_PLAIN_RESULTS, REFUSED, REFUSED_RESULTS


def written(value):
    """As a record holds it: plain JSON that reads back equal, in UTF-8."""
    text = json.dumps(asdict(value), allow_nan=False)
    assert json.loads(text) == json.loads(json.dumps(asdict(value), default=repr))
    return json.loads(text)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_grade_that_no_record_can_hold_is_refused_by_name(kind):
    with pytest.raises(ValueError, match=r"Grade|Requirement|grade returned"):
        plain_grade(REFUSED[kind])


@pytest.mark.parametrize("kind", REFUSED_RESULTS)
def test_an_answer_that_no_record_can_hold_is_refused_by_name(kind):
    with pytest.raises(ValueError, match=r"StepResult|step returned"):
        plain_result(REFUSED_RESULTS[kind])


@pytest.mark.parametrize("kind", MADE_PLAIN)
def test_a_grade_is_made_plain(kind):
    record = written(plain_grade(MADE_PLAIN[kind]))
    assert record["reward"] == 0.0
    assert record["success"] is False
    assert str(record).encode()


@pytest.mark.parametrize("kind", MADE_PLAIN_RESULTS)
def test_an_answer_is_made_plain(kind):
    record = written(plain_result(MADE_PLAIN_RESULTS[kind]))
    assert all(type(record[name]) is bool for name in ("done", "failed", "empty_action"))
    assert str(record).encode()


def test_a_score_of_numpys_says_what_it_said():
    score = np.float32(0.95)
    assert plain_grade(Grade(score, success=score > 0.9)) == Grade(float(score), True)
    score = torch.tensor(0.5)
    assert plain_grade(Grade(score, success=score > 0.9)) == Grade(0.5, False)


def test_what_is_plain_stays_as_it_is():
    requirements = (Requirement("one", True), Requirement("two", False, no_op_pass=True))
    uses = (ToolUse("add", 2, 1, "it fell"),)
    told = {"broke": Broke("step", "it fell"), "tools": uses}
    grade = Grade(0.5, False, requirements, **told, rewards={"form": 0.5}, metrics={"steps": -3.0})
    assert plain_grade(grade) == grade
    result = StepResult("seen\nreminder", True, True, True, "reminder", Broke("step", "it fell"), uses, -2.5)
    assert plain_result(result) == result


@pytest.mark.parametrize(
    "opening", [None, "begin", ["begin"], [Message("user", None)], [Message("agent", "begin")], [Message(1, "begin")]]
)
def test_an_opening_that_is_none_is_refused(opening):
    with pytest.raises(ValueError, match="opening"):
        plain_messages(opening)


def test_an_opening_is_made_plain():
    assert plain_messages((Message("user", "\ud800"),)) == [Message("user", "?")]
