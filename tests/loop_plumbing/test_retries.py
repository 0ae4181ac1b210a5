import itertools

import pytest

from loop_plumbing.retries import LONGEST_PAUSE_S, asked_to_wait, pauses


def test_pauses_grow_up_to_the_longest():
    assert list(itertools.islice(pauses(1.0), 8)) == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


@pytest.mark.parametrize(
    ("header", "wait_s"),
    [
        *[(None, 3.0), ("", 3.0), ("0", 3.0), ("7", 7.0), ("1e9", LONGEST_PAUSE_S), ("inf", LONGEST_PAUSE_S)],
        *[("-1", 3.0), ("nan", 3.0), ("Fri, 31 Dec 1999 23:59:59 GMT", 3.0), ("soon", 3.0)],
    ],
)
def test_a_service_may_ask_for_a_pause(header, wait_s):
    assert asked_to_wait(header, 3.0) == wait_s
