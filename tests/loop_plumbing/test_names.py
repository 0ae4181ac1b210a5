"""Which names were meant, by what was written."""

import math

import pytest

from loop_plumbing.names import explain_type_error, mistyped_option, nearest, similar_names
from support.texts import texts_beside

TABLES = texts_beside(__file__)

KNOWN = ["tiny_cpu", "qwen2_5_7b", "qwen3_8b", "qwen3_14b", "qwen3_32b", "ppo_critic", "dpo", "grpo", "method trees"]


@pytest.mark.parametrize(("name", "meant"), TABLES["a_name_may_be_written_otherwise_begun_turned_round_or_misspelt"])
def test_a_name_may_be_written_otherwise_begun_turned_round_or_misspelt(name, meant):
    assert similar_names(name, KNOWN) == meant


def test_several_are_offered_and_none_is_guessed():
    assert nearest("qwen3", KNOWN) == "did you mean 'qwen3_8b', 'qwen3_14b' or 'qwen3_32b'?"
    assert nearest("zzz", ["a", "b"]) == "known keys: a, b"
    assert nearest("zzz", KNOWN, "there are many") == "there are many"


class Pool:
    def __init__(self, spans, url, dataset, reset=None): ...


class Passing(Pool):
    def __init__(self, spans, key, **options):
        super().__init__(spans, **options)


@pytest.mark.parametrize(
    ("build", "given", "said"),
    [
        (Pool, ["dataset"], "needs 'url'"),
        (Pool, ["reset"], "needs 'url' and 'dataset'"),
        (Pool, ["dataset", "uri"], "was given options it does not take: 'uri'; did you mean 'url'?"),
        (Passing, ["url", "dataset", "kye"], "needs 'key'; 'kye': did you mean 'key'?"),
        (Passing, ["url", "key"], "needs 'dataset'"),
        (Passing, ["url", "key", "dataset", "rset"], "was given options it does not take: 'rset'; did you mean 'res"),
        (lambda spans, **options: len(spans), ["any"], "was given options it does not take: object of type 'int' has "),
    ],
)
def test_options_that_do_not_fit_are_named_with_those_that_were_meant(build, given, said):
    with pytest.raises(TypeError) as raised:
        build(1, **dict.fromkeys(given))
    assert explain_type_error(raised.value, build, "spans", given).startswith(said)


def test_an_option_of_another_type_is_named():
    def build(
        spans, size: int = 1, share: "float" = 0.5, name: str = "", on: bool = True, other: "int | None" = None
    ): ...

    for given, said in (
        ({"size": "x"}, "size must be int, not 'x'"),
        ({"size": True}, "size must be int, not True"),
        ({"size": None}, "size must be int, not None"),
        ({"share": "half"}, "share must be float, not 'half'"),
        ({"name": 3}, "name must be str, not 3; put quotes around it"),
        ({"other": 1.1}, "other must be int, not 1.1"),
        ({"share": math.nan}, "share must be float, not nan"),
        ({"on": "yes"}, "on must be bool, not 'yes'"),
        ({"size": 3, "share": 1, "name": "", "on": False, "other": None, "unknown": 1}, None),
    ):
        assert mistyped_option(build, given) == said
