"""sft_appworld on two ranks (gloo): the numbers and the policy of one process."""

import pytest

from support.sft_ranks import RANK_PAIRS, check_two_ranks

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("changes", [{}, RANK_PAIRS], ids=["cross_entropy", "pairs"])
def test_two_ranks_learn_the_same_from_a_fixed_set(tmp_path, changes):
    """The two rollouts of a pair may lie on different ranks."""
    check_two_ranks(tmp_path, changes)
