"""The buffer of pairs: what it was told of is on disk, whatever kills its writer."""

import json
import signal
import subprocess
import sys
from dataclasses import asdict

import pytest

from loop_contrib.turn_pairs import PairBuffer, TurnPair, read_pairs
from support.texts import texts_beside
from support.waiting import COMMAND_S

TABLES = texts_beside(__file__)

WRITER = TABLES["writer"]


def pair(turn, chosen="a", rejected="b", value=1.0):
    return TurnPair("t", turn, chosen, rejected, value, 0.0, 1, 1)


@pytest.mark.slow
def test_pairs_survive_a_sigkill_in_the_middle_of_a_line(tmp_path):
    file = tmp_path / "pairs.jsonl"
    for told in (3, 5):  # the second finds three of its pairs there
        command = [sys.executable, "-c", WRITER, str(file), str(told)]
        killed = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert killed.stdout.split() == [str(number) for number in range(told)]
        assert not file.read_text().endswith("\n")
        with PairBuffer(file) as buffer:
            assert [known.turn for known in buffer.pairs] == list(range(told))
    assert [json.loads(line) for line in file.read_text().splitlines()] == [asdict(pair(turn)) for turn in range(5)]


def test_two_turns_are_a_pair_once_and_their_newest_values_count(tmp_path):
    file = tmp_path / "new" / "pairs.jsonl"
    with PairBuffer(file) as buffer:
        assert buffer.add([pair(0), pair(1)]) == 2
        assert buffer.add([pair(0), pair(1, value=0.5), pair(1, chosen="c")]) == 2
    turned = pair(0, chosen="b", rejected="a")
    with PairBuffer(file) as buffer:
        assert buffer.pairs == [pair(0), pair(1, value=0.5), pair(1, chosen="c")]
        assert buffer.add([turned]) == 1
    assert read_pairs(file) == [turned, pair(1, value=0.5), pair(1, chosen="c")]


def test_a_line_that_is_no_pair_is_named(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"turn": 1}\n')
    with pytest.raises(ValueError, match=r"pairs\.jsonl holds a line that is not a pair"):
        PairBuffer(file)
