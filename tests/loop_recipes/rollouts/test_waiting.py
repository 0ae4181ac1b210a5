"""What a terminal and a log show of a wait."""

import io

import pytest

from loop_recipes.rollouts import waiting
from loop_recipes.rollouts.waiting import Waiting
from support.waiting import block_until


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(waiting, "REFRESH_S", 0.01)
    monkeypatch.setattr(waiting, "FIRST_LINE_S", 0.05)
    monkeypatch.setenv("COLUMNS", "200")


def test_a_terminal_keeps_one_line_and_clears_it():
    stream = Terminal()
    with Waiting("publishing policy version 3", stream) as shown:
        shown.report("vllm-0 starts, for 12 s")
        block_until(lambda: "publishing policy version 3: 0 s, vllm-0 starts, for 12 s" in stream.getvalue())
    assert stream.getvalue().endswith("\r\x1b[J")
    assert "\n" not in stream.getvalue()


def test_a_line_that_stays_has_a_line_of_the_terminal_to_itself():
    stream = Terminal()
    with Waiting("evaluating", stream) as shown:
        block_until(lambda: "evaluating: 0 s" in stream.getvalue())
        shown.clear()
        assert "evaluating: 0 s\r\x1b[J" in stream.getvalue()
    log = io.StringIO()
    Waiting("evaluating", log).clear()
    assert log.getvalue() == ""


def test_a_log_gets_a_line_for_what_takes_long_and_then_fewer():
    stream = io.StringIO()
    with Waiting("waiting for the rollout node", stream) as shown:
        block_until(lambda: stream.getvalue().count("\n") == 2)
        shown.report("it does not answer")
        block_until(lambda: "it does not answer\n" in stream.getvalue())
    assert all(line.startswith("waiting for the rollout node: ") for line in stream.getvalue().splitlines())


def test_what_is_there_at_once_is_not_mentioned(monkeypatch):
    monkeypatch.setattr(waiting, "REFRESH_S", 60.0)
    stream = io.StringIO()
    with Waiting("waiting", stream):
        pass
    assert stream.getvalue() == ""
