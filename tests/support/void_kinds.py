"""What a carelessly written environment hands over, and an agent could void its episode with: all fields, bad values.

:data:`REFUSED` no record can hold, or it contradicts itself; :data:`MADE_PLAIN` says the same as a plain value.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from agent_environments.protocol import Grade, Requirement, StepResult

NAN = float("nan")


class Unspeakable:
    """Nothing may be asked of it."""

    def __bool__(self):
        raise KeyboardInterrupt

    __repr__ = __str__ = __eq__ = __float__ = __bool__
    __hash__ = None


def grade(**fields: Any) -> Grade:
    return Grade(**{"reward": 0.0, "success": False, **fields})


def required(**fields: Any) -> Grade:
    return grade(requirements=(Requirement(**{"text": "is right", "passed": False, **fields}),))


def result(**fields: Any) -> StepResult:
    return StepResult(**{"observation": "seen", "done": True, **fields})


REFUSED: dict[str, Any] = {
    "reward NaN": grade(reward=NAN),
    "reward infinite": grade(reward=float("inf")),
    "reward below 0": grade(reward=-0.5),
    "reward above 1": grade(reward=1.5),
    "reward a text": grade(reward="1"),
    "reward None": grade(reward=None),
    "reward complex": grade(reward=1j),
    "reward unspeakable": grade(reward=Unspeakable()),
    "reward an array": grade(reward=np.ones(2)),
    "success NaN": grade(success=NAN),
    "success a text": grade(success="no"),
    "success None": grade(success=None),
    "success unspeakable": grade(success=Unspeakable()),
    "success of nothing": grade(success=True),
    "success without a requirement": Grade(1.0, True, (Requirement("is right", False),)),
    "requirements a text": grade(requirements="is right"),
    "requirements a dict": grade(requirements={"is right": False}),
    "requirements None": grade(requirements=None),
    "requirements of texts": grade(requirements=("is right",)),
    "requirements of dicts": grade(requirements=({"text": "is right", "passed": False},)),
    "requirements without an end": grade(requirements=iter(int, 1)),
    "requirement's text NaN": required(text=NAN),
    "requirement's text bytes": required(text=b"is right"),
    "passed NaN": required(passed=NAN),
    "passed a text": required(passed="no"),
    "passed unspeakable": required(passed=Unspeakable()),
    "no_op_pass NaN": required(no_op_pass=NAN),
    "no_op_pass unspeakable": required(no_op_pass=Unspeakable()),
    "ungradable NaN": grade(ungradable=NAN),
    "ungradable unspeakable": grade(ungradable=Unspeakable()),
    "a part of the reward NaN": grade(rewards={"form": NAN}),
    "rewards a list": grade(rewards=[0.5]),
    "a metric a text": grade(metrics={"steps": "three"}),
    "a metric without a name": grade(metrics={3: 1.0}),
    "grade None": None,
    "grade a number": 0.0,
    "grade a dict": {"reward": 0.0, "success": False},
}
"""Grades; of a state that is worth nothing, but for the two that claim success."""

REFUSED_RESULTS: dict[str, Any] = {
    "observation None": result(observation=None),
    "observation NaN": result(observation=NAN),
    "observation bytes": result(observation=b"seen"),
    "done NaN": result(done=NAN),
    "done unspeakable": result(done=Unspeakable()),
    "failed NaN": result(failed=NAN),
    "failed a text": result(failed="no"),
    "empty_action unspeakable": result(empty_action=Unspeakable()),
    "reminder None": result(reminder=None),
    "reminder NaN": result(reminder=NAN),
    "turn's reward NaN": result(reward=NAN),
    "turn's reward infinite": result(reward=float("-inf")),
    "turn's reward a text": result(reward="1"),
    "turn's reward unspeakable": result(reward=Unspeakable()),
    "result None": None,
    "result a tuple": ("seen", True),
}

MADE_PLAIN: dict[str, Grade] = {
    "reward of numpy's": grade(reward=np.float32(0.0)),
    "reward of numpy's double": grade(reward=np.float64(0.0)),
    "reward a truth value": grade(reward=False),
    "success of numpy's": grade(success=np.bool_(False)),
    "success a number": grade(success=0),
    "requirements a list": grade(requirements=[Requirement("is right", False)]),
    "requirement's text a lone surrogate": required(text="\ud800"),
    "passed of numpy's": required(passed=np.bool_(False)),
    "no_op_pass of numpy's": required(no_op_pass=np.bool_(True)),
    "ungradable a lone surrogate": grade(ungradable="\ud800"),
    "ungradable and worth something": Grade(1.0, True, ungradable="it is broken"),
}

MADE_PLAIN_RESULTS: dict[str, StepResult] = {
    "observation a lone surrogate": result(observation="\ud800"),
    "done of numpy's": result(done=np.bool_(True)),
    "failed of numpy's": result(failed=np.bool_(True)),
    "empty_action of numpy's": result(empty_action=np.bool_(False)),
    "reminder a lone surrogate": result(reminder="\ud800"),
    "turn's reward of numpy's": result(reward=np.float32(-2.0)),
}
