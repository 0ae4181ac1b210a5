"""What the sbatch scripts decide on one machine, and that their deadlines fit; test_slurm_jobs.py has whole jobs."""

import contextlib
import fcntl
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from loop_recipes.config.files import compose, split_words
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.evaluation.config import EvalConfig
from support.texts import texts_beside
from support.waiting import COMMAND_S

TABLES = texts_beside(__file__)

pytestmark = pytest.mark.drill
SLURM = Path(__file__).parents[2] / "slurm"


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
    begin += 'LOGS=$LOOP_HOME/logs/attempt-0; mkdir -p "$LOGS"\n'
    return batch("-c", begin + script, **environment)


ON_A_NODE = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "node", "SLURM_JOB_NODELIST": "node", "LOOP_GPUS_PER_NODE": "0"}


def batch(*words: str | Path, without: str = "", **environment: str) -> subprocess.CompletedProcess:
    """bash as Slurm runs it for job 7 on the node called node; ``without`` a variable that a site may lack."""
    given = {**os.environ, **ON_A_NODE, **environment}
    return subprocess.run(
        ["bash", *words],
        env={name: value for name, value in given.items() if name != without},
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
    done = batch(SLURM / script, "run", "config")
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
    programs(srun=f'echo "$*" >>{steps}', scontrol="echo node", sleep="")
    assert batch(SLURM / "eval.sbatch", "run", "config", LOOP_NODE_PORT="8701").returncode == 0
    assert " node.port=8701" in steps.read_text()


def test_a_node_that_does_both_trains_on_the_gpus_that_its_config_leaves(programs):
    programs(loop=f'exec {sys.executable} -m loop_recipes.cli "$@"')
    done = job("ranks_on_one_node qwen2_5_32b_one_node seed=1", LOOP_GPUS_PER_NODE="8")
    assert done.stdout == "8\n", done.stderr
    programs(loop="echo 'loop check: there is no config nosuch' >&2; exit 1")
    done = job("ranks_on_one_node nosuch || echo refused", LOOP_GPUS_PER_NODE="8")
    assert done.stdout == "refused\n"
    assert "loop check: there is no config nosuch" in done.stderr
    assert "loop check nosuch names no ranks of the trainer" in done.stderr


@pytest.mark.fault("a stream of several rollout nodes is refused by the trainer, after the nodes have started")
def test_a_config_that_several_nodes_cannot_serve_is_refused_before_they_start(programs, tmp_path):
    steps = tmp_path / "steps"
    loop = f'exec {sys.executable} -m loop_recipes.cli "$@"'
    programs(srun=f'echo "$*" >>{steps}', scontrol="printf '%s\\n' a b c", squeue="", curl="", sleep="", loop=loop)
    stream = ("qwen2_5_32b", "collection.stream=true")
    done = batch(SLURM / "train_loop.sbatch", "run", *stream, SLURM_JOB_CPUS_PER_NODE="8(x3)")
    assert done.returncode == 64
    assert "collection.stream takes one node: give rollout_node.url one address" in done.stderr
    assert "loop node" not in steps.read_text()


SITES = pytest.mark.fault("a Slurm site that is not as the tests' cluster")


@SITES
@pytest.mark.parametrize(
    ("nodes", "trainers", "processors", "on"), TABLES["the_last_nodes_train_as_one_job_and_the_others_sample"]
)
def test_the_last_nodes_train_as_one_job_and_the_others_sample(programs, tmp_path, nodes, trainers, processors, on):
    """Each with all processors that it has."""
    steps = tmp_path / "steps"
    programs(srun=f'echo "$*" >>{steps}', scontrol=f"printf '%s\\n' {nodes}", squeue="", curl="", sleep="", loop="")
    site = {"SLURM_JOB_CPUS_PER_NODE": processors, "SLURM_CPUS_ON_NODE": "6", "LOOP_TRAINER_NODES": trainers}
    batch(SLURM / "train_loop.sbatch", "run", "config", **site)
    said = [line for line in steps.read_text().splitlines() if "--job-name=preflight" not in line]
    found = [re.search(r"--nodelist=(\S+) .*--cpus-per-task=(\d+)", line) for line in said]
    assert sorted(":".join(each.groups()) for each in found) == on.split()
    (trainer,) = [line for line in said if "--job-name=trainer" in line]
    assert f"--nodes={trainers} --ntasks={trainers} " in trainer
    alone = "--standalone --nnodes 1 --local_addr 127.0.0.1 --nproc_per_node 1 loop_appworld"
    meets = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint b:29500 --rdzv-id 7-0 --nproc_per_node 1 loop_appworld"
    assert (meets if trainers == "2" else alone) in trainer


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
    batch(SLURM / "train_loop.sbatch", "run", "config")
    file = tmp_path / "runs/run/logs/job-7/attempt-0/token"
    if given:
        assert used.read_text().strip() == given
        assert not file.exists()
    else:
        assert used.read_text() == file.read_text() > "\n"
        assert file.stat().st_mode & 0o777 == 0o600


def srun(first: str = "") -> str:
    """Steps that end well, but for rollout nodes, which run until they are told to stop."""
    node = 'echo $$ >>"$LOOP_HOME/pids"; exec /bin/sleep 600'
    return f'{first}\ncase "$*" in *--job-name=rollout*) {node} ;; esac'


def scontrol(show: str = "JobId=7 PreemptTime=None", requeue: str = ":") -> str:
    return f'case "$*" in *hostnames*) echo node ;; requeue*) {requeue} ;; *) echo {show} ;; esac'


CLUSTER = {
    "srun": srun(),
    "scontrol": scontrol(),
    "squeue": "echo 7.1 rollout-0",
    "scancel": 'kill $(cat "$LOOP_HOME/pids")',
    "curl": "",
    "sleep": "/bin/sleep 0.01",
}
TRAIN, EVAL = SLURM / "train_loop.sbatch", SLURM / "eval.sbatch"


@contextlib.contextmanager
def held(lock: Path, holder: str):
    """The lock, held by somebody else; ``holder`` is its line."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lock.write_text(f"{holder}\n")
        yield


@pytest.mark.parametrize("lock", ["job.lock", "run.lock", "node/node.lock", "node-2/node.lock"])
def test_a_second_job_on_a_run_is_refused_before_it_touches_anything(programs, tmp_path, lock):
    """Whoever asked the first to stop is not overheard, and no step is started."""
    started, run = tmp_path / "started", tmp_path / "runs/run"
    programs(**{**CLUSTER, "srun": srun(f"touch {started}")})
    with held(run / lock, "job 6, attempt 0 on other, since yesterday"):
        (run / "stop").touch()
        done = batch(TRAIN, "run", "config")
        assert (done.returncode, started.exists(), (run / "stop").exists()) == (64, False, True)
    assert "is in use (job 6, attempt 0 on other, since yesterday): wait for its end, stop it, or" in done.stdout
    assert batch(TRAIN, "run", "config").returncode == 0
    with held(run / "evaluation/job.lock", "job 6"):
        assert [batch(EVAL, name, "config").returncode for name in ("run", "other")] == [64, 0]


@pytest.mark.parametrize(("lock", "holder"), [("node/node.lock", "rollout-server"), ("job.lock", "job 7, attempt 0")])
def test_an_earlier_attempt_that_lives_on_is_waited_for_and_then_the_job_requeued(programs, tmp_path, lock, holder):
    """Slurm does not hear its node any more, while its programs and its storage live on."""
    requeued, options = tmp_path / "requeued", {"SLURM_RESTART_COUNT": "1", "LOOP_LOST_NODE_TIMEOUT": "0"}
    programs(**{**CLUSTER, "scontrol": scontrol(requeue=f"touch {requeued}")})
    with held(tmp_path / "runs/run" / lock, holder):
        done = batch(TRAIN, "run", "config", **options)
    assert (done.returncode, requeued.exists()) == (0, True)
    assert f"an earlier attempt of this job lives on ({holder}); waiting for its end" in done.stdout
    requeued.unlink()
    assert batch(TRAIN, "run", "config", **options).returncode == 0
    assert not requeued.exists()


def test_another_jobs_lock_is_refused_by_a_requeued_job_too(programs, tmp_path):
    programs(**CLUSTER)
    with held(tmp_path / "runs/run/job.lock", "job 6, attempt 0"):
        done = batch(TRAIN, "run", "config", SLURM_RESTART_COUNT="1")
    assert done.returncode == 64


def test_a_usr1_before_the_trainer_runs_asks_nobody_to_save(programs, tmp_path):
    """While its node starts a job has nothing to save, and the stop file may be read by another."""
    requeued, run = tmp_path / "requeued", tmp_path / "runs/run"
    asked = {"scontrol": scontrol(requeue=f"touch {requeued}"), "curl": "kill -USR1 $PPID; exit 1"}
    programs(**{**CLUSTER, **asked})
    done = batch(TRAIN, "run", "config")
    assert (done.returncode, requeued.exists(), (run / "stop").exists()) == (0, True, False), done.stdout
    assert "there is nothing to save yet" in done.stdout


AWAY = "Unable to contact slurm controller (connect failure)"


def test_a_controller_that_is_away_is_asked_again(programs, tmp_path):
    tries = tmp_path / "tries"
    answer = f'echo x >>{tries}; [ "$(wc -l <{tries})" -gt 5 ] || {{ echo "{AWAY}" >&2; exit 1; }}'
    programs(scontrol=answer, sleep="")
    assert job("requeue").returncode == 0
    assert len(tries.read_text().splitlines()) == 6


@pytest.mark.parametrize(("said", "timeout"), [(AWAY, "0"), ("Requeue of this job is disabled", "900")])
def test_a_requeue_that_is_refused_says_with_which_words(programs, said, timeout):
    programs(scontrol=f'echo "{said}" >&2; exit 1', sleep="")
    done = job("requeue", LOOP_CONTROLLER_TIMEOUT=timeout)
    assert done.returncode == 75
    assert f"this cluster refuses to requeue ({said}): submit the same line again" in done.stdout


def test_only_a_jobs_own_requeues_are_counted(programs):
    programs(scontrol="", sleep="")
    for _ in range(2):
        assert job("requeue", LOOP_MAX_REQUEUES="2", SLURM_RESTART_COUNT="9").returncode == 0
    done = job("requeue", LOOP_MAX_REQUEUES="2")
    assert (done.returncode, "requeued 2 times already" in done.stdout) == (75, True)


@pytest.mark.parametrize("exported", ["NONE", "VAR=1"])
def test_a_submission_without_the_submitters_environment_reaches_the_steps_whole(programs, tmp_path, exported):
    seen = tmp_path / "seen"
    programs(**{**CLUSTER, "srun": srun(f'echo "${{SLURM_EXPORT_ENV-none}} $PATH" >>{seen}')})
    assert batch(TRAIN, "run", "config", SLURM_EXPORT_ENV=exported).returncode == 0
    assert {line.split()[0] for line in seen.read_text().splitlines()} == {"none"}
    assert all("/.venv/bin" in line for line in seen.read_text().splitlines())


def test_usr1_ends_no_step(programs, tmp_path):
    """``scancel -s USR1`` without ``-b`` reaches the steps as well."""
    (tmp_path / "out").touch()
    programs(srun='while [ "$1" != bash ]; do shift; done; exec "$@"')
    program = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); print('lives')"
    assert "lives" in job(f"start_step s node log {sys.executable} -c {shlex.quote(program)}; wait").stdout


@pytest.mark.parametrize("script", [TRAIN, EVAL])
def test_a_submission_from_elsewhere_is_one_line(programs, tmp_path, monkeypatch, script):
    programs(**CLUSTER)
    monkeypatch.delenv("LOOP_SLURM_DIR")
    done = batch(script, "run", "config", SLURM_SUBMIT_DIR=str(tmp_path))
    assert done.returncode == 64
    assert done.stderr.splitlines() == [
        f"there is no {tmp_path}/slurm/site.sh: submit from the checkout, or set LOOP_SLURM_DIR to its folder slurm"
    ]


@pytest.mark.parametrize(
    ("script", "word"),
    [(TRAIN, f"{key}=x") for key in ("output_dir", "resume_from_checkpoint", "rollout_node.url", "rollout_node.launch")]
    + [(EVAL, f"{key}=x") for key in ("output_dir", "run", "node.port")],
)
@pytest.mark.parametrize("of_a_task", [False, True])
def test_keys_that_the_script_sets_are_refused(programs, tmp_path, script, word, of_a_task):
    programs(**CLUSTER)
    words = ["seed=1", "--", word] if of_a_task else ["seed=1", word]
    done = batch(script, "run", "config", *words, **({"SLURM_ARRAY_TASK_ID": "0"} if of_a_task else {}))
    assert done.returncode == 64
    assert done.stderr.startswith(f"{word}: the script sets {word.partition('=')[0]} itself")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("script", [TRAIN, EVAL])
def test_an_array_gives_each_task_its_word_and_its_folder(programs, tmp_path, script):
    steps = tmp_path / "steps"
    programs(**{**CLUSTER, "srun": srun(f'echo "$*" >>{steps}')})
    words = ["run", "config", "lr=1", "--", "seed=1", "seed=2"]
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    assert batch(script, *words, **array, SLURM_ARRAY_TASK_COUNT="2").returncode == 0
    folder = tmp_path / "runs/run" / ("1-seed-2" if script == TRAIN else "evaluation/1-seed-2")
    assert (folder / "logs").is_dir()
    said = [line for line in steps.read_text().splitlines() if "output_dir" in line]
    assert said
    assert all(f"output_dir={folder} " in line and " lr=1 seed=2" in line for line in said)
    for wrong in ({"SLURM_ARRAY_TASK_ID": "2"}, {"SLURM_ARRAY_TASK_ID": ""}):
        assert batch(script, *words, **{**array, **wrong}).returncode == 64
    assert batch(script, "run", "config", **array).returncode == 64
    part = batch(script, *words, **array, SLURM_ARRAY_TASK_COUNT="1")
    assert (part.returncode, "this array has 1 of the 2 words after --" in part.stdout) == (0, True)


def documented() -> list[tuple[str, str]]:
    """The commands of sbatch in the pages and in the heads of scripts: where each stands, and the command."""
    files = [*(SLURM.parent / "docs").glob("*.md"), TRAIN, EVAL]
    texts = {file.name: re.sub(r" *\\\n#?\s*", " ", file.read_text()) for file in files}
    found = [
        (name, line)
        for name, text in texts.items()
        for line in re.findall(r"^(?:#   )?((?:LOOP_\w+=\S+ )?sbatch .*?\.sbatch .*?)(?:  .*)?$", text, re.MULTILINE)
    ]
    return [(name, line) for name, line in found if " CONFIG" not in line and not line.endswith("...")]


@pytest.mark.fault("commands of a page that its script refuses")
@pytest.mark.parametrize(("where", "command"), documented())
def test_the_scripts_take_what_the_pages_tell_to_submit(programs, where, command):
    programs(**CLUSTER)
    words = shlex.split(command)
    at = next(place for place, word in enumerate(words) if word.endswith(".sbatch"))
    script, (run, config, *given) = SLURM.parent / words[at], words[at + 1 :]
    common, own = split_words(given)
    last = next((word.rpartition("-")[2].rpartition("=")[2] for word in words[:at] if "--array=" in word), None)
    assert (last is None) == (not own)
    recipe, section = ("loop_appworld", LoopConfig) if script == TRAIN else ("eval_appworld", EvalConfig)
    for task in range(0 if last is None else int(last) + 1) or [None]:
        array = {} if task is None else {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(task)}
        done = batch(script, run, config, *given, **array)
        assert done.returncode == 0, done.stderr
        folder = [] if script == TRAIN else [f"run={run}"]
        read_config(compose(config, [*folder, *common, *([] if task is None else [own[task]])], recipe), section)


def test_pages_tell_what_to_submit():
    assert len(documented()) >= 10
    assert {name for name, _ in documented()} == {"operations.md", "reproduce_the_paper.md", TRAIN.name, EVAL.name}


@pytest.mark.parametrize(("minutes", "code"), [(20, 64), (24 * 60, 0)])
def test_a_time_limit_that_leaves_no_time_to_save_is_refused(programs, minutes, code):
    end = f'$(date -d "+{minutes} minutes" +%Y-%m-%dT%H:%M:%S)'
    programs(**{**CLUSTER, "scontrol": scontrol(f"JobId=7 StartTime=x EndTime={end} Deadline=N/A")})
    done = batch(TRAIN, "run", "config")
    assert done.returncode == code
    assert ("and saving may take 1320: give sbatch more --time" in done.stdout) == (code == 64)


def test_what_slurm_tells_of_nodes_without_a_step_is_no_reason(programs):
    noise = "scancel: error: Kill job error on job step id 7.1: Invalid job id specified"
    programs(squeue="echo 7.1 trainer", scancel=f'echo "{noise}" >&2; echo "another error" >&2; exit 1')
    done = job("signal_step TERM trainer; sleep 0.2")
    assert done.stderr.splitlines() == ["another error"]


SETTINGS = """
    TRAINER_NODES=0 TRAINER_NODES=-1 TRAINER_NODES=two TRAINER_NODES=01 GPUS_PER_NODE=gpu:8 NODE_PORT=70000
    TRAINER_PORT=0 MAX_REQUEUES=-1 SAVE_TIMEOUT=20m READY_TIMEOUT=0 PREFLIGHT_TIMEOUT=1.5 LOST_NODE_TIMEOUT=9999999999
"""


@SITES
@pytest.mark.parametrize(("script", "settings"), [(TRAIN, SETTINGS), (EVAL, "NODE_PORT=x")])
def test_a_setting_that_is_no_number_in_its_range_is_one_line(programs, tmp_path, script, settings):
    programs(**CLUSTER)
    for setting in settings.split():
        done = batch(script, "run", "config", **dict([f"LOOP_{setting}".split("=")]))
        assert done.returncode == 64
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"LOOP_{setting}: must be a whole number from ")
    assert not (tmp_path / "runs").exists()


@SITES
@pytest.mark.parametrize(
    ("script", "lacks"),
    [(EVAL, "SLURMD_NODENAME"), (EVAL, "SLURM_SUBMIT_DIR"), (TRAIN, "SLURM_CPUS_ON_NODE"), (EVAL, "HOME")],
)
def test_a_variable_that_an_allocation_lacks_is_not_needed(programs, script, lacks):
    programs(**CLUSTER)
    done = batch(script, "run", "config", without=lacks)
    assert (done.returncode, "unbound" in done.stderr) == (0, False), done.stderr
    outside = batch(script, "run", "config", without="SLURM_JOB_ID")
    said = "this is not a Slurm job: give the script to sbatch, or run it within salloc\n"
    assert (outside.returncode, outside.stderr) == (64, said)


@SITES
@pytest.mark.parametrize(("names", "said"), [("a b", "the name b of a node of this job is not found"), ("a", "good")])
def test_a_node_that_is_not_found_by_its_name_is_named(programs, tmp_path, names, said):
    programs(python='case "$*" in *getaddrinfo*" b") exit 1 ;; *) echo None ;; esac')
    done = batch(SLURM / "preflight.sh", tmp_path, *names.split())
    assert done.stdout.splitlines()[-1].startswith(said)
    assert done.returncode == (said != "good")


@pytest.mark.fault("a Slurm job is asked to save in its last update")
@pytest.mark.parametrize("preempted", ["None", "2026-11-25T01:43:39"])
@pytest.mark.parametrize(("done", "unscored", "over"), [(4, "null", True), (3, "null", False), (4, "{", False)])
def test_a_job_that_was_about_to_end_is_over(programs, tmp_path, preempted, done, unscored, over):
    requeued, run = tmp_path / "requeued", tmp_path / "runs/run"
    state = run / f"checkpoints/iteration_{done:04}/state.json"
    state.parent.mkdir(parents=True)
    state.write_text(f'{{\n "unscored": {unscored}\n}}')
    (run / "config.yaml").write_text("seed: 1\nmax_iterations: 4\n")
    asked = srun('case "$*" in *--job-name=trainer*) kill -USR1 $PPID; exit 0 ;; esac')
    control = scontrol(f"JobId=7 PreemptTime={preempted}", requeue=f"touch {requeued}")
    programs(**{**CLUSTER, "srun": asked, "scontrol": control})
    assert batch(TRAIN, "run", "config").returncode == 0
    assert requeued.exists() == (not over)
