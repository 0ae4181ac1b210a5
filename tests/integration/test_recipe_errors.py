"""Commands with something wrong: one line that names thing and cure, exit status 1, no process left behind.

The one that goes farthest runs as a command of its own, the others in this process, which has torch imported already.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torchtune._cli.tune import main

from loop_formats.places import loop_home
from rollout_server.inference.server import free_port
from support.small_runs import launched_node, replay_config
from support.waiting import COMMAND_S

pytestmark = pytest.mark.integration
MARK = "LOOP_TEST_OF_ERRORS"
ENGINE = loop_home() / ".venv-appworld" / "bin" / "python"


def tune(config: Path, *overrides: str) -> tuple[int, str]:
    """Exit status, and everything printed."""
    environment = {key: value for key, value in os.environ.items() if key != "ROLLOUT_SERVER_TOKEN"}
    done = subprocess.run(
        [sys.executable, "-m", "torchtune._cli.tune", "run", "loop_appworld", "--config", str(config), *overrides],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        env={**environment, "OMP_NUM_THREADS": "1", MARK: str(config)},
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def tune_here(monkeypatch, capfd):
    """As :func:`tune`, up to the end of the process."""

    def run(config: Path, *overrides: str, **variables: str) -> tuple[int, str]:
        monkeypatch.delenv("ROLLOUT_SERVER_TOKEN", raising=False)
        for name, value in {MARK: str(config), **variables}.items():
            monkeypatch.setenv(name, value)
        command = ["tune", "run", "loop_appworld", "--config", str(config), *overrides]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        output = "".join(capfd.readouterr())
        return (code, output) if isinstance(code, int) else (1, f"{output}{code}\n")

    return run


def left_behind(config: Path) -> list[str]:
    """Command lines of processes that inherited the mark of a run of ``config``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={config}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def node_config(folder: Path, **changes: object) -> Path:
    """A run that launches its node over the AppWorld engine and the synthetic world."""
    environment = {
        "python": str(ENGINE),
        "root": str(loop_home() / "worlds" / "synthetic"),
        "prompt": "tiny",
        "observation_max_tokens": 200,
    }
    node = launched_node({"name": "appworld", **environment}, max_num_seqs=4)
    return replay_config(folder, iterations=1, **node, **changes)


def last_line(output: str) -> str:
    return [line for line in output.splitlines() if line.strip()][-1]


def check(config: Path, status: int, output: str, *words: str) -> None:
    assert status == 1, output
    assert "Traceback" not in output
    assert "Unclosed" not in output
    line = last_line(output)
    assert line.startswith("loop_appworld: ")
    for word in words:
        assert word in line
    assert left_behind(config) == []


def test_a_wrong_key_ends_the_command_before_anything_starts(tmp_path, tune_here):
    config = node_config(tmp_path)
    status, output = tune_here(config, "collection.rollouts_per_tsk=6")
    check(config, status, output, "unknown key 'collection.rollouts_per_tsk'", "did you mean")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not ENGINE.exists(), reason="needs .venv-appworld (make setup)")
@pytest.mark.parametrize(("key", "cure"), [("root", "make world"), ("python", "make setup")])
def test_what_of_the_environment_is_missing_is_named_with_what_makes_it(tmp_path, tune_here, key, cure):
    config = node_config(tmp_path)
    status, output = tune_here(config, f"node.environment.{key}={tmp_path / 'nowhere'}")
    check(config, status, output, str(tmp_path / "nowhere"), cure)


def test_a_node_that_is_not_there_is_named(tmp_path, tune_here):
    url = f"http://127.0.0.1:{free_port()}"
    config = replay_config(tmp_path, iterations=1, rollout_node={"url": url, "start_deadline_s": 1.0})
    status, output = tune_here(config, ROLLOUT_SERVER_TOKEN="secret")
    check(config, status, output, f"no rollout node at {url}", "fix the URL")


@pytest.mark.skipif(not ENGINE.exists(), reason="needs .venv-appworld (make setup)")
def test_an_unknown_task_is_refused_before_anything_is_sampled(tmp_path, shared_vllm):
    """On the server that the tests share, whose policy has the same shape."""
    config = node_config(tmp_path)
    status, output = tune(
        config,
        f"node.servers.urls=[{shared_vllm.url}]",
        "collection.tasks=[nobody_1]",
        "collection.tasks_per_iteration=1",
    )
    check(config, status, output, "nobody_1")
    assert not [log for log in (tmp_path / "run/node/collections").glob("*.jsonl") if log.stat().st_size]
