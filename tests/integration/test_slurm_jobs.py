"""The sbatch scripts on a real Slurm of two nodes, each in a network of its own, with the tiny policy on CPU.

Every drill is a whole job with real vLLM, so they are not part of the default run: `make drills`.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from slurm_cluster import NODES, SlurmCluster, missing_for_cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
CHECKOUT = Path(__file__).parents[2]
SMALL = (
    "max_iterations=3",
    "collection.tasks_per_iteration=2",
    "collection.rollouts_per_task=2",
    "collection.min_rollouts_per_task=2",
    "collection.min_rollouts_fraction=1.0",
    "collection.limits.max_turns=3",
    "rollout_node.config.max_concurrent_episodes=4",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    missing = missing_for_cluster()
    if missing:
        pytest.skip(f"no Slurm cluster here: {missing}")
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"), user=_submitter(), gpus=0, kill_wait=30)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def submit(cluster, tmp_path):
    """Submits a training job with runs of its own; returns (job id, run folder)."""
    _open_to(tmp_path)
    jobs = []

    def submit(run="drill", *overrides, options=(), env=None):
        job = cluster.submit(
            CHECKOUT / "slurm/train_loop.sbatch",
            run,
            "loop_appworld/tiny_cpu",
            *SMALL,
            *overrides,
            options=("--gpus-per-node=0", "--signal=B:USR1@60", "--time=30", *options),
            cwd=tmp_path,
            env={
                "LOOP_HOME": str(CHECKOUT),
                "LOOP_SLURM_DIR": str(CHECKOUT / "slurm"),
                "LOOP_RUNS": str(tmp_path / "runs"),
                "LOOP_GPUS_PER_NODE": "0",
                "LOOP_READY_TIMEOUT": "240",
                "OMP_NUM_THREADS": "1",
                **(env or {}),
            },
        )
        jobs.append(job)
        return job, tmp_path / "runs" / run

    yield submit
    for job in jobs:
        cluster.command("scancel", str(job), check=False)
        cluster.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", timeout=90)
    _expect_nothing_left(tmp_path)


def test_a_job_ends_normally_with_its_logs_where_the_docs_say(cluster, submit):
    job, run = submit()
    ended = cluster.wait_for(job, "COMPLETED", "FAILED", timeout=400)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), _logs(run)
    assert [row["iteration"] for row in _metrics(run)] == [1, 2, 3]
    logs = run / "logs/attempt-0"
    assert {"trainer.log", "rollout_node.log", f"preflight-{NODES[0]}.log"} <= {path.name for path in logs.iterdir()}


def test_a_bad_node_is_named_before_anything_starts(cluster, submit):
    # Something on the second node holds the rollout node's port.
    taken = subprocess.Popen(["ip", "netns", "exec", NODES[1], "python3", "-m", "http.server", "8700"])
    try:
        job, run = submit("preflight")
        ended = cluster.wait_for(job, "COMPLETED", "FAILED", timeout=120)
    finally:
        taken.kill()
        taken.wait()
    assert ended["ExitCode"] == "69:0"
    output = next(run.parents[1].glob("*.out")).read_text()
    assert f"bad node {NODES[1]}: port 8700 is taken" in output
    assert f"bad node {NODES[0]}" not in output


def test_a_crash_of_the_trainer_fails_the_job_and_is_not_requeued(cluster, submit):
    job, run = submit("trainer-crash")
    _until(lambda: len(_metrics(run)) >= 1, 400, run)
    _kill("loop_appworld.py", run)
    ended = cluster.wait_for(job, "COMPLETED", "FAILED", timeout=120)
    assert ended["JobState"] == "FAILED"
    assert ended["ExitCode"].split(":")[0] not in ("0", "70")
    assert ended["Restarts"] == "0"


def test_a_crash_of_the_rollout_node_saves_and_fails_with_its_own_code(cluster, submit):
    job, run = submit("node-crash")
    _until(lambda: len(_metrics(run)) >= 1, 400, run)
    _kill("rollout_server.cli", run)
    ended = cluster.wait_for(job, "COMPLETED", "FAILED", timeout=300)
    assert ended["ExitCode"] == "70:0", _logs(run)
    assert list((run / "checkpoints").glob("iteration_*"))


def test_usr1_saves_requeues_and_the_same_command_line_goes_on(cluster, submit):
    job, run = submit("requeue")
    _until(lambda: len(_metrics(run)) >= 1, 400, run)
    cluster.command("scancel", "-b", "-s", "USR1", str(job))
    _until(lambda: (run / "logs/attempt-1").exists(), 200, run)
    ended = cluster.wait_for(job, "COMPLETED", "FAILED", timeout=400)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), _logs(run)
    assert [row["iteration"] for row in _metrics(run)] == [1, 2, 3]


def test_scancel_leaves_nothing_behind(cluster, submit):
    job, run = submit("cancelled")
    _until(lambda: len(_metrics(run)) >= 1, 400, run)
    cluster.command("scancel", str(job))
    assert cluster.wait_for(job, "CANCELLED", timeout=120)["JobState"] == "CANCELLED"


def _submitter() -> str:
    """An unprivileged user where one can read the environments, else root."""
    probe = ["su", "-s", "/bin/sh", "nobody", "-c", f"{CHECKOUT}/.venv/bin/python -c 'import torch'"]
    return "nobody" if subprocess.run(probe, capture_output=True, timeout=60).returncode == 0 else "root"


def _open_to(folder: Path) -> None:
    folder.chmod(0o777)
    for parent in folder.parents:
        if parent.stat().st_uid == os.getuid() and str(parent).startswith("/tmp/"):
            parent.chmod(parent.stat().st_mode | 0o055)


def _metrics(run: Path) -> list[dict]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _until(condition, timeout: float, run: Path) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, _logs(run)
        time.sleep(0.5)


def _logs(run: Path) -> str:
    files = [*run.parents[1].glob("*.out"), *run.glob("logs/*/*.log")]
    return "\n".join(f"== {file}\n{file.read_text(errors='replace')[-2000:]}" for file in files)


def _processes(word: str, run: Path) -> list[int]:
    """Process ids whose command line names ``word`` and this run's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line and str(run) in line:
            found.append(int(entry.name))
    return found


def _kill(word: str, run: Path) -> None:
    processes = _processes(word, run)
    assert processes, f"no process of {word} for {run}"
    for process in processes:
        os.kill(process, signal.SIGKILL)


def _expect_nothing_left(folder: Path) -> None:
    deadline = time.monotonic() + 30
    while left := _processes("", folder):
        assert time.monotonic() < deadline, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
        time.sleep(0.5)
    shutil.rmtree(folder / "runs", ignore_errors=True)
