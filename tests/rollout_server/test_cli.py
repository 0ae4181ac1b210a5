"""What `rollout-server` does to its own process before it serves."""

import subprocess
import sys

import pytest

LIMITED = """
import logging, resource, sys
from rollout_server.cli import _raise_open_files
logging.basicConfig(stream=sys.stdout, format="%(message)s")
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
_raise_open_files(100)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "said"),
    [
        (128, 3000, 1856, ""),
        (2500, 3000, 2500, ""),
        (128, 1000, 1000, "at most 1000 files may be open, and 100 episodes may need 1856: "),
    ],
)
def test_the_limit_of_open_files_is_raised_to_what_the_episodes_need(soft, hard, raised, said):
    program = [sys.executable, "-c", LIMITED.format(soft=soft, hard=hard)]
    *warnings, limits = subprocess.run(program, check=True, capture_output=True, text=True).stdout.splitlines()
    assert limits == f"{raised} {hard}"
    assert [line.startswith(said) for line in warnings] == [True] * bool(said)
