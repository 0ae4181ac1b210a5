"""Which names were meant, by what was written."""

import pytest

from loop_plumbing.names import alike, nearest

KNOWN = ["tiny_cpu", "qwen2_5_7b", "qwen3_8b", "qwen3_14b", "qwen3_32b", "ppo_critic", "dpo", "grpo", "method trees"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TINY-CPU", ["tiny_cpu"]),
        ("qwen2.5-7b", ["qwen2_5_7b"]),
        ("qwen3", ["qwen3_8b", "qwen3_14b", "qwen3_32b"]),
        ("qwen", ["qwen3_8b", "qwen3_14b", "qwen3_32b"]),
        ("cpu_tiny", ["tiny_cpu"]),
        ("trees", ["method trees"]),
        ("ppo", ["ppo_critic"]),
        ("gpro", ["grpo"]),
        ("d", []),
        ("", []),
        ("zzz", []),
    ],
)
def test_a_name_may_be_written_otherwise_begun_turned_round_or_misspelt(name, meant):
    assert alike(name, KNOWN) == meant


def test_several_are_offered_and_none_is_guessed():
    assert nearest("qwen3", KNOWN) == "did you mean 'qwen3_8b', 'qwen3_14b' or 'qwen3_32b'?"
    assert nearest("zzz", ["a", "b"]) == "known keys: a, b"
    assert nearest("zzz", KNOWN, "there are many") == "there are many"
