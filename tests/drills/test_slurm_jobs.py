"""The sbatch scripts on a real Slurm of three nodes, each in a network of its own, with the tiny policy on CPU.

Every drill is a whole job with real vLLM, so they are not part of the default run: `make drills`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from loop_formats.run_files import only_logs
from loop_recipes.engine.checkpoint import load_training_state
from support.slurm_cluster import NODES, SlurmCluster, missing_for_cluster
from support.small_jobs import CHECKOUT, SMALL, metrics
from support.two_networks import inside

pytestmark = [pytest.mark.integration, pytest.mark.slurm, pytest.mark.timeout(2000)]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
SMALL_EVALUATION = (
    "policies=[{name: after, adapter: '${run}'}]",
    "samplings=[{temperature: 0.0, runs: 1}]",
    "limits.max_turns=3",
)


@dataclass
class Jobs:
    """Submits the scripts, and remembers what must be gone in the end.

    ``seen`` are processes that a job was found to have on the nodes, as :meth:`SlurmCluster.processes` names them.
    """

    cluster: SlurmCluster
    folder: Path
    ids: list[str] = field(default_factory=list)
    seen: set[tuple[int, str]] = field(default_factory=set)

    def submit(self, script: str, *words: str, options: tuple[str, ...] = (), **env: str) -> str:
        job = self.cluster.submit(
            CHECKOUT / "slurm" / script,
            *words,
            options=("--gpus-per-node=0", "--time=60", *options),
            cwd=self.folder,
            env={
                "LOOP_HOME": str(CHECKOUT),
                "LOOP_SLURM_DIR": str(CHECKOUT / "slurm"),
                "LOOP_RUNS": str(self.folder / "runs"),
                "LOOP_GPUS_PER_NODE": "0",
                "LOOP_READY_TIMEOUT": "900",
                "OMP_NUM_THREADS": "1",
                **env,
            },
        )
        self.ids.append(str(job))
        return str(job)

    def train(self, run: str, *overrides: str, options: tuple[str, ...] = (), **env: str) -> tuple[str, Path]:
        """A training job; returns its id and the run's folder."""
        words = (run, "loop_appworld/tiny_cpu", *SMALL, *overrides)
        return self.submit("train_loop.sbatch", *words, options=options, **env), self.folder / "runs" / run

    def end(self, job: str, timeout: float = 900) -> tuple[str, int]:
        """Wait for a job; returns its state and exit code."""
        fields = self.cluster.wait_for(job, *ENDED, timeout=timeout)
        return fields["JobState"], int(fields["ExitCode"].split(":")[0])

    def until(self, condition: Callable[[], object], job: str, timeout: float = 900) -> None:
        """Wait for a condition on a job that still runs."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"not in time\n{self.logs()}"
            assert self.cluster.job(job)["JobState"] not in ENDED, f"job {job} has ended\n{self.logs()}"
            time.sleep(0.5)
        self.seen |= self.cluster.processes()

    def output(self) -> str:
        """What the batch scripts said."""
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("*.out")))

    def logs(self) -> str:
        files = [*self.folder.glob("*.out"), *self.folder.glob("runs/**/*.log")]
        return "\n".join(f"== {file}\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    def clean_up(self) -> None:
        for job in self.ids:
            subprocess.run(["scancel", job], env=self.cluster.environment, capture_output=True, timeout=60)
        for job in self.ids:
            self.cluster.wait_for(job, *ENDED, timeout=120)

    def expect_nothing_left(self) -> None:
        deadline = time.monotonic() + 30
        while left := self.cluster.processes() | {item for item in self.seen if _lives(*item)}:
            assert time.monotonic() < deadline, [_command_line(pid) for pid, _ in left]
            time.sleep(0.5)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[SlurmCluster]:
    missing = missing_for_cluster()
    if missing:
        pytest.skip(f"no Slurm cluster here: {missing}")
    folder = tmp_path_factory.mktemp("slurm")
    _open_to_all(folder)
    cluster = SlurmCluster(folder, user=_submitter(), gpus=0, kill_wait=30)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def jobs(cluster, tmp_path) -> Iterator[Jobs]:
    _open_to_all(tmp_path)
    cluster.wait_idle()
    jobs = Jobs(cluster, tmp_path)
    try:
        yield jobs
    finally:
        jobs.clean_up()
    jobs.expect_nothing_left()


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory) -> Path:
    """A run that nothing happened to: what a disturbed one is compared with."""
    folder = tmp_path_factory.mktemp("undisturbed")
    _open_to_all(folder)
    jobs = Jobs(cluster, folder)
    try:
        job, run = jobs.train("run")
        jobs.until(lambda: metrics(run), job)
        assert jobs.end(job) == ("COMPLETED", 0), jobs.logs()
    finally:
        jobs.clean_up()
    jobs.expect_nothing_left()
    assert "the trainer ended with 0" in jobs.output()
    return run


def test_a_job_ends_normally_with_its_logs_where_the_docs_say(undisturbed):
    assert [row["iteration"] for row in metrics(undisturbed)] == [1, 2, 3]
    (attempt,) = undisturbed.glob("logs/job-*/attempt-0")
    assert {path.name for path in attempt.iterdir()} == {
        "trainer.log",
        "rollout_node-0.log",
        "token",
        *(f"preflight-{node}.log" for node in NODES[:2]),
    }
    assert len(only_logs(undisturbed.glob("node/collections/drill-i000?-*.jsonl"))) == 3
    assert (undisturbed / "policies/policy-v0003/adapter_model.safetensors").is_file()


def wait_for_port(node: str, port: int) -> None:
    """Return once something listens on the node's port: at a high load the preflight would be there first."""
    probe = f"import socket; socket.create_connection(('127.0.0.1', {port})).close()"
    deadline = time.monotonic() + 300
    while subprocess.run(inside(node, sys.executable, "-c", probe), capture_output=True).returncode:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_bad_node_is_named_before_anything_starts(jobs):
    # Something on the second node holds the rollout node's port.
    taken = subprocess.Popen(inside(NODES[1], "python3", "-m", "http.server", "8700"), stderr=subprocess.DEVNULL)
    try:
        wait_for_port(NODES[1], 8700)
        job, run = jobs.train("preflight")
        assert jobs.end(job) == ("FAILED", 69), jobs.logs()
    finally:
        taken.kill()
        taken.wait(10)
    assert f"bad node {NODES[1]}: port 8700 is taken" in jobs.output()
    assert f"bad node {NODES[0]}" not in jobs.output()
    assert not list(run.glob("logs/*/*/rollout_node*.log"))


def test_nodes_without_their_gpus_are_named(jobs):
    job, _ = jobs.train("gpus", LOOP_GPUS_PER_NODE="8")
    assert jobs.end(job) == ("FAILED", 69), jobs.logs()
    for node in NODES[:2]:
        assert f"bad node {node}: 0 GPUs answer, LOOP_GPUS_PER_NODE is 8" in jobs.output()


def test_a_node_that_lost_its_network_is_named_within_the_deadline(cluster, jobs):
    cluster.networks.cut(NODES[1])
    try:
        job, _ = jobs.train("cable", LOOP_PREFLIGHT_TIMEOUT="30")
        jobs.until(lambda: f"bad node {NODES[1]}" in jobs.output(), job, timeout=150)
    finally:
        cluster.networks.mend(NODES[1])
    assert jobs.end(job) == ("FAILED", 69), jobs.logs()
    assert "rollout node ready" not in jobs.output()


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("nodes", "trainers"), [("2", "1"), ("3", "2")])
def test_a_crash_of_a_trainer_fails_the_job_and_is_not_requeued(cluster, jobs, nodes, trainers):
    options = (f"--nodes={nodes}",)
    job, run = jobs.train("trainer-crash", "max_iterations=100", options=options, LOOP_TRAINER_NODES=trainers)
    jobs.until(lambda: metrics(run), job)
    _kill("loop_appworld.py", run, most=1)
    state, code = jobs.end(job)
    assert state == "FAILED"
    assert code not in (0, 69, 70, 75)
    assert cluster.job(job)["Restarts"] == "0"


def test_a_crash_of_the_rollout_node_saves_and_fails_with_its_own_code(jobs):
    job, run = jobs.train("node-crash", "max_iterations=100")
    jobs.until(lambda: metrics(run), job)
    _kill("bin/loop", run)
    assert jobs.end(job) == ("FAILED", 70), jobs.logs()
    done = max(row["iteration"] for row in metrics(run))
    assert (run / f"checkpoints/iteration_{done:04d}/state.json").is_file()


def test_usr1_requeues_goes_on_to_the_same_result_and_then_lets_an_array_evaluate(cluster, jobs, undisturbed):
    job, run = jobs.train("run")
    words = ("run", "eval_appworld/tiny_cpu", *SMALL_EVALUATION, "--", "split=dev", "split=test_challenge")
    array = jobs.submit("eval.sbatch", *words, options=(f"--dependency=afterok:{job}", "--array=0-1"))
    jobs.until(lambda: metrics(run), job)
    cluster.command("scancel", "-b", "-s", "USR1", job)
    jobs.until(lambda: list(run.glob("logs/*/attempt-1/trainer.log")), job)
    assert cluster.job(array)["Reason"] == "Dependency"
    assert jobs.end(job) == ("COMPLETED", 0), jobs.logs()
    assert cluster.job(job)["Restarts"] == "1"
    assert [*map(_learned, metrics(run))] == [*map(_learned, metrics(undisturbed))]
    adapter = "policies/policy-v0003/adapter_model.safetensors"
    assert (run / adapter).read_bytes() == (undisturbed / adapter).read_bytes()

    for index, split in enumerate(("dev", "test_challenge")):
        assert jobs.end(f"{array}_{index}") == ("COMPLETED", 0), jobs.logs()
        folder = run / f"evaluation/{index}-split-{split}"
        tasks = (CHECKOUT / f"worlds/synthetic/data/datasets/{split}.txt").read_text().split()
        assert sorted(_scored(folder / "journal.jsonl")) == sorted(tasks)
        assert list(folder.glob("logs/*/attempt-0/evaluation.log"))


def test_two_rollout_nodes_share_the_tasks(jobs):
    job, run = jobs.train("three", "max_iterations=2", options=("--nodes=3",))
    jobs.until(lambda: metrics(run), job)
    assert jobs.end(job) == ("COMPLETED", 0), jobs.logs()
    assert [row["rollouts"] for row in metrics(run)] == [6, 6]
    for folder, share in (("node", "1of2"), ("node-1", "2of2")):
        logs = [*(run / folder).glob(f"collections/drill-i000?-*-{share}.jsonl")]
        assert [len(log.read_text().splitlines()) for log in logs] == [3, 3]


@pytest.mark.timeout(3000)
def test_trainers_on_two_nodes_learn_what_one_does_requeue_and_end_together(cluster, jobs, undisturbed):
    job, run = jobs.train("trainers", options=("--nodes=3",), LOOP_TRAINER_NODES="2")
    jobs.until(lambda: metrics(run), job)
    cluster.command("scancel", "-b", "-s", "USR1", job)
    jobs.until(lambda: list(run.glob("logs/*/attempt-1/trainer.log")), job)
    assert jobs.end(job) == ("COMPLETED", 0), jobs.logs()
    assert cluster.job(job)["Restarts"] == "1"
    first, alone = metrics(run)[0], metrics(undisturbed)[0]
    for key in ("loss", "grad_norm", "approx_kl"):
        assert first[key] == pytest.approx(alone[key], rel=1e-4, abs=1e-7), key
    assert [row["iteration"] for row in metrics(run)] == [1, 2, 3]
    assert sorted(load_training_state(run / "checkpoints/iteration_0003").rng) == ["rank0", "rank1"]


def test_an_evaluation_requeues_on_usr1_and_repeats_nothing(cluster, jobs):
    policy = "policies=[{name: before, adapter: null}]"
    words = ("none", "eval_appworld/tiny_cpu", *SMALL_EVALUATION, policy, "split=test_normal")
    job = jobs.submit("eval.sbatch", *words)
    journal = jobs.folder / "runs/none/evaluation/journal.jsonl"
    jobs.until(lambda: journal.exists() and len(_scored(journal)) >= 5, job)
    cluster.command("scancel", "-b", "-s", "USR1", job)
    jobs.until(lambda: list(journal.parent.glob("logs/*/attempt-1")), job)
    before = journal.read_text()
    assert jobs.end(job) == ("COMPLETED", 0), jobs.logs()
    assert journal.read_text().startswith(before)
    scored = _scored(journal)
    assert (len(scored), len({*scored})) == (66, 66)
    assert "going on with" in "".join(file.read_text() for file in journal.parent.glob("logs/*/attempt-1/eval*"))


def test_a_job_that_may_not_requeue_saves_and_says_that_it_is_not_finished(cluster, jobs):
    job, run = jobs.train("cap", "max_iterations=100", LOOP_MAX_REQUEUES="0")
    jobs.until(lambda: metrics(run), job)
    cluster.command("scancel", "-b", "-s", "USR1", job)
    assert jobs.end(job) == ("FAILED", 75), jobs.logs()
    assert "submit the same line again" in jobs.output()


def test_scancel_leaves_nothing_behind_and_the_same_line_goes_on(jobs, cluster):
    job, run = jobs.train("cancelled")
    jobs.until(lambda: metrics(run), job)
    cluster.command("scancel", job)
    assert jobs.end(job)[0] == "CANCELLED"
    jobs.expect_nothing_left()
    again, _ = jobs.train("cancelled")
    assert jobs.end(again) == ("COMPLETED", 0), jobs.logs()
    assert [row["iteration"] for row in metrics(run)] == [1, 2, 3]


def test_the_time_limit_without_a_warning_leaves_nothing_behind(jobs):
    # CONT in place of USR1 is not a warning. Slurm looks at limits once in a while, and counts in minutes.
    job, run = jobs.train(
        "limit", "max_iterations=1000", options=("--time=4", "--signal=B:CONT@10"), LOOP_SAVE_TIMEOUT="60"
    )
    jobs.until(lambda: list(run.glob("logs/*/attempt-0/rollout_node-0.log")), job)
    assert jobs.end(job)[0] == "TIMEOUT", jobs.logs()


def _submitter() -> str:
    """An unprivileged user where one can read the environments, else root."""
    probe = ["su", "-s", "/bin/sh", "nobody", "-c", f"{CHECKOUT}/.venv/bin/python -c 'import torch'"]
    return "nobody" if subprocess.run(probe, capture_output=True, timeout=60).returncode == 0 else "root"


def _open_to_all(folder: Path) -> None:
    """Let the submitter and the nodes' daemons into a folder that pytest made for its own user."""
    folder.chmod(0o777)
    for parent in folder.parents:
        if parent.stat().st_uid == os.getuid() and str(parent).startswith("/tmp/"):
            parent.chmod(parent.stat().st_mode | 0o055)


def _scored(journal: Path) -> list[str]:
    """The tasks that an evaluation has a result of, in order; other lines of its journal say what they rest on, and the
    last one may be half written."""
    lines = map(json.loads, journal.read_text().rpartition("\n")[0].splitlines())
    return [line["task_id"] for line in lines if "task_id" in line]


def _learned(row: dict) -> dict:
    """An iteration without its times, and without what is made of the sampler's log-probs: vLLM rounds them otherwise
    with each number of sequences that it computes at once, which is the machine's haste."""
    of_the_sampler = ("entropy_estimate", "gap_mean", "gap_p99", "gap_max")
    return {key: value for key, value in row.items() if "second" not in key and key not in of_the_sampler}


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _lives(pid: int, start_time: str) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return False
    return fields[19] == start_time and fields[0] != "Z"


def _kill(word: str, run: Path, most: int | None = None) -> None:
    """SIGKILL to the processes whose command line names ``word`` and this run's folder, to ``most`` of them."""
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    found = [pid for pid in pids if word in (line := _command_line(pid)) and str(run) in line]
    assert found, f"no process of {word} for {run}"
    for pid in found[:most]:
        os.kill(pid, signal.SIGKILL)
