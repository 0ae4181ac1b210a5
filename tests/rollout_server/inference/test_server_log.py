"""The one line of a server's log that names what it died of."""

import pytest

from rollout_server.inference import server_log
from rollout_server.inference.server_log import last_line, own_error
from support.fake_vllm import ENGINE_DEATH
from support.texts import texts_beside

TEXTS = texts_beside(__file__)
BAD_OPTION = TEXTS["bad_option"]
ENGINE_START = TEXTS["engine_start"]
KILLED = TEXTS["killed"]


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (ENGINE_DEATH, "RuntimeError: Unsupported CPU attention: head_dim=16"),
        (ENGINE_START, "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"),
        (
            BAD_OPTION,
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig Value error, Invalid "
            "repository ID or local directory specified: 'nowhere' [type=value_error]",
        ),
        (
            "usage: vllm serve\nvllm: error: unrecognized arguments: --fast",
            "vllm: error: unrecognized arguments: --fast",
        ),
        ("AssertionError\nbye", "AssertionError"),
        (KILLED, None),
        ("", None),
    ],
)
def test_the_engines_own_error_comes_before_what_others_say_of_it(tmp_path, log, error):
    file = tmp_path / "log"
    earlier = b"ValueError: of an earlier start\n"
    file.write_bytes(earlier + log.encode() + b"\n\n")
    assert own_error(file, len(earlier)) == error
    assert last_line(file, len(earlier)) == " ".join(log.splitlines()[-1].split() if log else [])


def test_long_lines_and_logs_are_cut_and_none_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(server_log, "READ_BYTES", 2000)
    file = tmp_path / "log"
    file.write_text("ValueError: first\n" + "x" * 3000 + "\nKeyError: " + "y" * 900)
    assert own_error(file, 0).startswith("KeyError: yyy")
    assert len(own_error(file, 0)) == server_log.MAX_CHARACTERS
    assert own_error(tmp_path / "nowhere", 0) is None
