"""Rollout node and trainer as two hosts, with latency, packet loss and an outage between them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.small_jobs import CHECKOUT, SMALL, metrics
from support.two_networks import LossyLink, address, inside, missing_for_networks
from support.waiting import COMMAND_S, DEADLINE_S

pytestmark = [pytest.mark.integration, pytest.mark.slurm, pytest.mark.timeout(600)]
HOSTS = ("loopwest", "loopeast")
PORT = 8700


@pytest.fixture
def link() -> Iterator[LossyLink]:
    missing = missing_for_networks()
    if missing or not Path("/dev/net/tun").exists():
        pytest.skip(f"no two hosts here: {missing or 'no /dev/net/tun'}")
    link = LossyLink(HOSTS, delay_s=0.04, loss=0.02)
    try:
        link.start()
        yield link
    finally:
        link.stop()


def test_a_run_over_a_bad_network_completes_and_says_so(link, tmp_path):
    run = tmp_path / "run"
    words = [f"output_dir={run}", *SMALL]
    node = [sys.executable, "-m", "loop_recipes.cli", "node", "tiny_cpu", *words]
    trainer = [str(CHECKOUT / ".venv/bin/tune"), "run", "loop_appworld", "--config", "loop_appworld/tiny_cpu", *words]
    started = []
    try:
        started.append(_start(HOSTS[0], tmp_path / "node.log", *node, "--", "host=0.0.0.0", f"port={PORT}"))
        url = f"http://{address(2)}:{PORT}"
        elsewhere = ("rollout_node.launch=False", f"rollout_node.url={url}")
        started.append(_start(HOSTS[1], tmp_path / "trainer.log", *trainer, *elsewhere))
        deadline = time.monotonic() + COMMAND_S
        while not metrics(run):
            assert started[1].poll() is None, (tmp_path / "trainer.log").read_text()[-3000:]
            assert time.monotonic() < deadline, f"no iteration within {COMMAND_S:g} s"
            time.sleep(0.2)
        # All is lost for a while, in the middle of a collection or of an upload.
        link.loss = 1.0
        time.sleep(15)
        link.loss = 0.02
        assert started[1].wait(COMMAND_S) == 0, (tmp_path / "trainer.log").read_text()[-3000:]
        started[0].send_signal(signal.SIGTERM)
        assert started[0].wait(DEADLINE_S) == 0
    finally:
        for process in started:
            process.kill()
            process.wait(DEADLINE_S)
    assert [row["iteration"] for row in metrics(run)] == [1, 2, 3]
    assert [row["rollouts"] for row in metrics(run)] == [6, 6, 6]
    assert {row["gap_verdict"] for row in metrics(run)} == {"ok"}
    assert "iteration   3/3" in (tmp_path / "trainer.log").read_text()
    assert link.lost > 10, f"{link.lost} of {link.lost + link.delivered} frames lost"


def _start(host: str, log: Path, *command: str) -> subprocess.Popen:
    """A command on one of the hosts, which ends with this test at the latest."""
    with open(log, "wb") as output:
        return subprocess.Popen(
            inside(host, "setpriv", "--pdeathsig", "TERM", *command),
            stdout=output,
            stderr=output,
            cwd=CHECKOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "ROLLOUT_SERVER_TOKEN": "two hosts"},
        )
