"""What the sbatch scripts decide on one machine, and that their deadlines fit; tests/integration/ has whole jobs."""

import os
import re
import subprocess
import sysconfig
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from support.waiting import COMMAND_S

SLURM = Path(__file__).parents[1] / "slurm"


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Put shell scripts of these names before all other programs of the scripts."""
    folder = tmp_path / ".venv/bin"  # what loop_activate puts into PATH
    folder.mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("LOOP_HOME", str(tmp_path))
    monkeypatch.setenv("LOOP_SLURM_DIR", str(SLURM))

    def write(**scripts: str) -> None:
        for name, script in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)

    return write


def job(script: str, **environment: str) -> subprocess.CompletedProcess:
    """Run lines of a batch script, after those that every script begins with."""
    begin = '. "$LOOP_SLURM_DIR/site.sh"; . "$LOOP_SLURM_DIR/job_lib.sh"; set -uo pipefail; ATTEMPT=0\n'
    return batch("-c", begin + script, **environment)


def batch(*words: str | Path, **environment: str) -> subprocess.CompletedProcess:
    """bash as Slurm runs it for job 7 on the node called node."""
    return subprocess.run(
        ["bash", *words],
        env={**os.environ, "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "node", "SLURM_JOB_NODELIST": "node", **environment},
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )


def test_the_warning_comes_before_the_time_that_saving_may_take():
    warned = int(re.search(r"--signal=B:USR1@(\d+)", (SLURM / "train_loop.sbatch").read_text())[1])
    saving = int(re.search(r"LOOP_SAVE_TIMEOUT:=(\d+)", (SLURM / "site.sh").read_text())[1])
    assert warned >= saving + 120, "stopping the steps takes up to 80 s each"


@pytest.mark.parametrize("script", ["eval.sbatch", "train_loop.sbatch"])
def test_a_whole_node_comes_with_all_of_its_memory(script):
    options = re.findall(r"^#SBATCH (\S+)", (SLURM / script).read_text(), flags=re.MULTILINE)
    assert {"--exclusive", "--mem=0"} <= set(options), "--exclusive alone gives the partition's default memory"


@pytest.mark.parametrize(
    ("gpus", "cuda", "headers", "said"),
    [
        (0, "None", "/nowhere", "good"),
        (1, "13.0", sysconfig.get_config_var("INCLUDEPY"), "good"),
        (1, "None", "/nowhere", "is a CPU build: run make setup GPU=1"),
        (1, "13.0", "/nowhere", "/gcc) and /nowhere/Python.h when it starts: install gcc and python3-dev"),
    ],
)
def test_a_node_with_gpus_needs_the_cuda_builds_and_what_triton_compiles_with(
    programs, monkeypatch, tmp_path, gpus, cuda, headers, said
):
    python = f'case "$*" in *INCLUDEPY*) echo {headers} ;; *) echo {cuda} ;; esac'
    programs(**{"nvidia-smi": "echo GPU 0: pretended", "gcc": "", "python": python})
    monkeypatch.setenv("LOOP_GPUS_PER_NODE", str(gpus))
    monkeypatch.delenv("CC", raising=False)
    done = subprocess.run(["bash", SLURM / "preflight.sh", tmp_path], capture_output=True, text=True, timeout=COMMAND_S)
    assert said in done.stdout.splitlines()[-1]
    assert done.returncode == (0 if said == "good" else 1)


@pytest.mark.parametrize(
    ("trainers", "said"), [("1", "good"), ("2", "port 29500 is taken: set another LOOP_TRAINER_PORT in slurm/site.sh")]
)
def test_the_port_where_trainers_meet_is_asked_for_where_there_are_several(programs, tmp_path, trainers, said):
    programs(python='case "$1" in -) ! grep -q 29500 ;; *) echo None ;; esac')
    environment = {**os.environ, "LOOP_GPUS_PER_NODE": "0", "LOOP_TRAINER_NODES": trainers}
    command = ["bash", SLURM / "preflight.sh", tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMMAND_S)
    assert done.stdout.splitlines()[-1] == said


@pytest.mark.parametrize(
    ("array", "name"), [({}, "7"), ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "7_3")]
)
def test_a_task_of_an_array_acts_on_itself_alone(programs, tmp_path, array, name):
    called = tmp_path / "called"
    programs(
        squeue=f'echo "squeue $*" >>{called}; echo {name}.1 evaluation',
        scancel=f'echo "scancel $*" >>{called}',
        scontrol=f'echo "scontrol $*" >>{called}',
        sleep="",
    )
    assert job("signal_step TERM evaluation; requeue", **array).returncode == 0
    assert called.read_text().splitlines() == [
        f"squeue -h -s -j {name} -o %i %j",
        f"scancel --signal=TERM {name}.1",
        f"scontrol requeue {name}",
    ]


@pytest.mark.parametrize("script", ["eval.sbatch", "train_loop.sbatch"])
@pytest.mark.parametrize(("preempted", "codes"), [("2026-11-25T01:43:39", {0}), ("None", {1, 70})])
def test_a_job_whose_steps_end_because_it_is_preempted_requeues(programs, tmp_path, script, preempted, codes):
    requeued = tmp_path / "requeued"
    programs(
        srun='case "$*" in *--job-name=preflight*) exit 0 ;; *) exit 1 ;; esac',
        scontrol=f'case "$*" in requeue*) echo "$2" >{requeued} ;; *hostnames*) echo node ;; '
        f"*) echo JobId=7 PreemptEligibleTime=2026-11-25T01:43:20 PreemptTime={preempted} ;; esac",
        squeue="",
        curl="",
        sleep="",
    )
    done = batch(SLURM / script, "run", "config", LOOP_GPUS_PER_NODE="0")
    assert done.returncode in codes, done.stdout + done.stderr
    assert requeued.exists() == (preempted != "None")


class Healthy(BaseHTTPRequestHandler):
    """A rollout node that is ready."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_proxy_for_the_internet_does_not_hide_a_rollout_node(programs, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with HTTPServer(("127.0.0.1", 0), Healthy) as node:
        threading.Thread(target=node.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{node.server_port}"
        done = job(f"wait_ready {url} $$ 10", http_proxy="http://127.0.0.1:9")
        node.shutdown()
    assert f"rollout node ready at {url}" in done.stdout


def test_the_node_of_an_evaluation_takes_the_port_that_the_preflight_checks(programs, tmp_path):
    steps = tmp_path / "steps"
    programs(srun=f'echo "$*" >>{steps}', scontrol="", sleep="")
    assert batch(SLURM / "eval.sbatch", "run", "config", LOOP_NODE_PORT="8701").returncode == 0
    assert " node.port=8701" in steps.read_text()


@pytest.mark.parametrize(
    ("nodes", "trainers", "on"),
    [("a", "1", [["a"], ["a"]]), ("a b c", "1", [["a"], ["b"], ["c"]]), ("a b c", "2", [["a"], ["b,c"]])],
)
def test_the_last_nodes_train_as_one_job_and_the_others_sample(programs, tmp_path, nodes, trainers, on):
    steps = tmp_path / "steps"
    programs(srun=f'echo "$*" >>{steps}', scontrol=f"printf '%s\\n' {nodes}", squeue="", curl="", sleep="")
    batch(SLURM / "train_loop.sbatch", "run", "config", LOOP_GPUS_PER_NODE="0", LOOP_TRAINER_NODES=trainers)
    said = [line for line in steps.read_text().splitlines() if "--job-name=preflight" not in line]
    assert sorted(re.findall(r"--nodelist=(\S+)", line) for line in said) == on
    (trainer,) = [line for line in said if "--job-name=trainer" in line]
    assert f"--nodes={trainers} --ntasks={trainers} " in trainer
    meets = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint b:29500 --rdzv-id 7-0 --nproc_per_node 1 loop_appworld"
    assert (meets if trainers == "2" else "--standalone --nnodes 1 --nproc_per_node 1 loop_appworld") in trainer


@pytest.mark.parametrize(("nodes", "trainers"), [("a", "2"), ("a b", "2")])
def test_trainers_on_all_nodes_are_refused(programs, nodes, trainers):
    programs(scontrol=f"printf '%s\\n' {nodes}")
    done = batch(SLURM / "train_loop.sbatch", "run", "config", LOOP_TRAINER_NODES=trainers)
    assert done.returncode == 64
    assert f"LOOP_TRAINER_NODES=2 of {len(nodes.split())} nodes leaves none for rollouts" in done.stdout


@pytest.mark.parametrize("given", ["", "of the submitter"])
def test_the_owner_of_a_training_job_can_know_its_token(programs, monkeypatch, tmp_path, given):
    used = tmp_path / "used"
    programs(srun=f'echo "$ROLLOUT_SERVER_TOKEN" >{used}', scontrol="echo node", squeue="", curl="", sleep="")
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", given)
    batch(SLURM / "train_loop.sbatch", "run", "config", LOOP_GPUS_PER_NODE="0")
    file = tmp_path / "runs/run/logs/job-7/attempt-0/token"
    if given:
        assert used.read_text().strip() == given
        assert not file.exists()
    else:
        assert used.read_text() == file.read_text() > "\n"
        assert file.stat().st_mode & 0o777 == 0o600
