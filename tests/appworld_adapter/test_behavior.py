"""Appendix A.1 on conversations small enough to count by hand."""

import pytest

from agent_environments.agent_turns import AgentTurn
from appworld_adapter.behavior import AppWorldBehavior, give_up_counts

BEHAVIOR = AppWorldBehavior()
FAILED = "Execution failed. Traceback:\n  boom"


def episode(*pairs):
    """The behaviour of an agent that wrote the first text of each pair and got the second."""
    return BEHAVIOR.counts([AgentTurn(*pair) for pair in pairs])


def aggregate(*episodes):
    """The figures over some episodes, by name."""
    return {figure.name: figure.value(episodes) for figure in BEHAVIOR.figures}


def code(*lines, language="python"):
    return "```" + language + "\n" + "\n".join(lines) + "\n```"


def turn(failed, *endpoints):
    return AgentTurn(code(*(f"apis.{endpoint}()" for endpoint in endpoints)), FAILED if failed else "ok")


def test_give_up_a_failed_call_never_tried_again():
    assert give_up_counts([turn(True, "venmo.login"), turn(False, "phone.login")]) == (1, 0)


def test_give_up_recovers_only_what_failed():
    # turn 1 fails with a, b: failed 2. Turn 2 succeeds with b and c: only b was in the set: recovered 1.
    turns = [turn(True, "x.a", "x.b"), turn(False, "x.b", "x.c")]
    assert give_up_counts(turns) == (2, 1)


def test_give_up_counts_a_repeated_failure_once_and_a_second_failure_after_recovery_again():
    turns = [
        turn(True, "x.a"),  # set {a}, failed 1
        turn(True, "x.a", "x.b"),  # only b is new: set {a, b}, failed 2
        turn(False, "x.a", "x.a"),  # removes a once: recovered 1
        turn(True, "x.a"),  # a is new again: failed 3
        turn(False, "x.a"),  # recovered 2
        turn(False, "x.a"),  # nothing left of a: recovered stays 2
    ]
    assert give_up_counts(turns) == (3, 2)


def test_give_up_ignores_failures_without_endpoints_and_prose():
    prose = AgentTurn("I will call apis.x.a() again." + code("1 / 0"), FAILED)
    assert give_up_counts([prose, turn(False, "x.a")]) == (0, 0)


def test_give_up_rate_is_pooled_over_rollouts_not_averaged():
    first = episode((code("apis.x.a(); apis.x.b(); apis.x.c()"), FAILED), (code("apis.x.a()"), "ok"))
    second = episode((code("apis.x.a()"), FAILED), (code("apis.x.a()"), "ok"))
    assert (first["failed_calls"], first["recovered_calls"]) == (3, 1)
    assert (second["failed_calls"], second["recovered_calls"]) == (1, 1)
    assert aggregate(first, second)["give_up_rate"] == pytest.approx((4 - 2) / 4)  # the mean of rates would be 1/3


def test_give_up_rate_is_undefined_without_failures():
    assert aggregate(episode((code("apis.x.a()"), "ok")))["give_up_rate"] is None


def test_every_count_of_a_rollout():
    first = (
        "I assumed it, assuming so; one assumes. No assumption.\n"
        + code("print(apis.api_docs.show_api_doc(app='x'))", "y = apis.api_docs.show_api_doc (1)")
        + "\nand\n"
        + code("dummy = 1", language="py")
    )
    second = "dummy dummy\n" + code("apis.x.a()") + "\n```json\n{}\n```\n"
    third = "no code, I assume"
    unanswered = "```python\napis.x.b("
    behavior = episode(
        (first, "ok\nExecution failed. is not at the start"), (second, FAILED), (third, ""), (unanswered, None)
    )
    lines = "print(apis.api_docs.show_api_doc(app='x'))\ny = apis.api_docs.show_api_doc (1)"
    assert behavior["turns"] == 3
    assert behavior["code_characters"] == len(lines) + len("dummy = 1") + len("apis.x.a()") + len("apis.x.b(")
    assert behavior["multiple_cell_turns"] == 1  # the json fence of the second turn is not a code cell
    assert behavior["failed_turns"] == 1
    assert (behavior["failed_calls"], behavior["recovered_calls"]) == (1, 0)
    assert behavior["show_api_doc_calls"] == 2
    assert behavior["assume"] == 4  # assumed, assuming, assumes; and assume in the third turn
    assert behavior["dummy"] == 3  # one in code, two in prose


def test_aggregate_divides_by_rollouts_and_by_turns():
    one = episode((code("a") + code("b"), "ok"), (code("c"), FAILED))
    other = episode((code("d"), "ok"), (code("e"), "ok"))
    behavior = aggregate(one, other)
    assert behavior["turns"] == 2.0
    assert behavior["code_characters"] == (3 * 1 + 2 * 1) / 2
    assert behavior["multiple_cells_per_turn"] == 1 / 4
    assert behavior["execution_errors_per_turn"] == 1 / 4


def test_api_calls_keep_order_and_repetitions_across_blocks_and_turns():
    turns = [
        AgentTurn(code("apis.b.x(apis.a.y())") + code("map(apis.c.z, [])"), "ok"),
        AgentTurn(code("apis.a.y()"), "ok"),
    ]
    assert BEHAVIOR.calls(turns) == ["b.x", "a.y", "c.z", "a.y"]


def test_shares_of_turns_are_zero_where_there_are_none():
    silent = aggregate(episode(("no code", None)))
    assert silent["execution_errors_per_turn"] == silent["multiple_cells_per_turn"] == 0.0


def test_no_rollouts_have_no_figures():
    assert set(aggregate().values()) == {None}
