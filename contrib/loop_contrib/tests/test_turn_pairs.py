"""The file of pairs."""

import pytest

from loop_contrib.turn_pairs import TurnPair, read_pairs, write_pairs


def pair(turn, chosen="a", rejected="b", value=1.0):
    return TurnPair("t", turn, chosen, rejected, value, 0.0, 1, 1)


def test_two_turns_are_a_pair_once_and_the_last_line_counts(tmp_path):
    turned = pair(0, chosen="b", rejected="a")
    write_pairs(tmp_path, [], [pair(0), pair(1), pair(1, value=0.5), pair(1, chosen="c"), turned])
    assert read_pairs(tmp_path / "pairs.jsonl") == [turned, pair(1, value=0.5), pair(1, chosen="c")]


def test_a_line_that_is_no_pair_is_named(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"turn": 1}\n')
    with pytest.raises(ValueError, match=r"pairs\.jsonl holds a line that is not a pair"):
        read_pairs(file)
