"""Ranks (gloo): the numbers of one process, an exact resume after SIGKILL, and how a job of `tune run` ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.multiprocessing import ProcessExitedException

from loop_recipes.engine.checkpoint import load_training_state
from loop_recipes.run.stop_request import ANSWERS
from rollout_server.inference.server import free_port
from support.deaths import deterministic
from support.processes import IMPORT_PATH, alive
from support.rank_failure import run_to_its_end, stopped_in_step, train_until_killed
from support.ranks import on_ranks
from support.small_runs import replay_config, train_into
from support.waiting import COMMAND_S, DEADLINE_S, block_until

pytestmark = pytest.mark.integration
ITERATIONS = 3
CRITIC = "loop_recipes.algorithm.critic.Critic"
TUNE = [sys.executable, "-m", "torchtune._cli.tune", "run"]


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_two_ranks_give_the_numbers_of_one_and_resume_exactly_after_sigkill(tmp_path):
    config = replay_config(tmp_path, iterations=ITERATIONS)
    train_into(config, tmp_path / "one")
    on_ranks(2, train_into, config, tmp_path / "two")
    for one, two in zip(lines(tmp_path / "one"), lines(tmp_path / "two"), strict=True):
        for key in ("loss", "grad_norm", "grad_norm_max", "gap_mean", "approx_kl", "ratio_p99"):
            assert two[key] == pytest.approx(one[key], rel=1e-5, abs=1e-7), (one["iteration"], key)
        for key in ("iteration", "rollouts", "steps", "kept_fraction", "reward", "policy_version"):
            assert two[key] == one[key], key

    broken = tmp_path / "broken"
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        on_ranks(2, train_until_killed, config, broken, 3)
    assert [line["iteration"] for line in lines(broken)] == [1, 2]
    on_ranks(2, train_into, config, broken, True)

    assert deterministic(broken / "metrics.jsonl") == deterministic(tmp_path / "two/metrics.jsonl")
    last = f"checkpoints/iteration_{ITERATIONS:04d}"
    for file in sorted((tmp_path / "two" / last).glob("*.safetensors")):
        assert file.read_bytes() == (broken / last / file.name).read_bytes(), file.name
    assert sorted(load_training_state(broken / last).rng) == ["rank0", "rank1"]


def test_a_sharded_critic_learns_what_a_whole_one_does(tmp_path):
    critic = {"_component_": CRITIC, "hidden_sizes": [16, 8], "warmup_iterations": 1}
    config = replay_config(
        tmp_path,
        iterations=2,
        credit={"critic": {**critic, "lr": 1e-2}},
        update={"loss_divisor": "tokens", "micro_batch_tokens": 150},
    )
    train_into(config, tmp_path / "one")
    on_ranks(2, train_into, config, tmp_path / "two")
    for one, two in zip(lines(tmp_path / "one"), lines(tmp_path / "two"), strict=True):
        for key in ("loss", "value_loss", "grad_norm"):
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-7), (one["iteration"], key)
    one, two = (load_training_state(tmp_path / name / "checkpoints/iteration_0002") for name in ("one", "two"))
    for name, tensor in one.further["critic"].items():
        assert two.further["critic"][name].shape == tensor.shape
        assert two.further["critic"][name].numpy() == pytest.approx(tensor.numpy(), rel=1e-3, abs=1e-5), name


def test_ranks_that_share_rows_learn_what_one_does_and_resume_exactly(tmp_path):
    """Old log-probs and entropy, a critic, and what is kept of each token; four ranks in twos, two to a machine."""
    shared = {
        "packed": True,
        "micro_batch_tokens": 150,
        "minibatch_rollouts": 4,
        "exact_entropy": True,
        "loss_divisor": "tokens",
    }
    changes = {
        "update": {**shared, "token_statistics": True},
        "credit": {"critic": {"_component_": CRITIC, "hidden_sizes": [8], "warmup_iterations": 1}},
        "lr_scheduler": {"_component_": "loop_recipes.algorithm.lr_schedules.constant_with_warmup"},
    }
    train_into(replay_config(tmp_path, iterations=2, **changes), tmp_path / "one")
    changes["update"]["micro_batch_tokens"] = 75
    config = replay_config(tmp_path, iterations=2, sequence_parallel=2, **changes)
    on_ranks(4, train_into, config, tmp_path / "four", machines=2)
    for one, four in zip(lines(tmp_path / "one"), lines(tmp_path / "four"), strict=True):
        for key in ("loss", "value_loss", "grad_norm", "entropy", "gap_mean", "approx_kl", "ratio_p99"):
            assert four[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), (one["iteration"], key)
    kept = [
        {row["rollout_id"]: row["ratios"] for file in folder.glob("*.jsonl") for row in map(json.loads, file.open())}
        for folder in (tmp_path / "one/token_statistics", tmp_path / "four/token_statistics")
    ]
    assert kept[1].keys() == kept[0].keys()
    assert all(kept[1][name] == pytest.approx(ratios, abs=1e-3) for name, ratios in kept[0].items())

    begun = replay_config(tmp_path, iterations=2, sequence_parallel=2, **changes, max_iterations=1)
    on_ranks(4, train_into, begun, tmp_path / "twice", machines=2)
    rest = replay_config(tmp_path, iterations=2, sequence_parallel=2, **changes, resume_from_checkpoint=True)
    on_ranks(4, train_into, rest, tmp_path / "twice", machines=2)
    for file in sorted((tmp_path / "four/checkpoints/iteration_0002").glob("*.safetensors")):
        again = tmp_path / "twice/checkpoints/iteration_0002" / file.name
        assert file.read_bytes() == again.read_bytes(), file.name


@pytest.mark.parametrize("packed", [True, False])
def test_two_ranks_learn_the_same_from_preference_pairs(tmp_path, packed):
    """The two rollouts of a pair may lie on different ranks; each pair's weights are the same on both."""
    config = replay_config(
        tmp_path,
        iterations=2,
        advantage={"_component_": "loop_recipes.algorithm.preferences.ReturnPairs", "threshold": 0.3},
        loss={"_component_": "loop_recipes.algorithm.preferences.DMPO", "beta": 1.0},
        update={"epochs": 3, "minibatch_rollouts": 4, "micro_batch_tokens": 150, "packed": packed},
    )
    train_into(config, tmp_path / "one")
    on_ranks(2, train_into, config, tmp_path / "two")
    for one, two in zip(lines(tmp_path / "one"), lines(tmp_path / "two"), strict=True):
        for key in ("loss", "grad_norm", "preference_margin"):
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-7), (one["iteration"], key)
        # At the first step every margin is zero up to rounding, so its sign means nothing.
        assert two["preference_accuracy"] == pytest.approx(one["preference_accuracy"], abs=1 / 3)


@pytest.mark.fault("a machine whose name does not resolve")
@pytest.mark.skipif(os.geteuid() != 0, reason="gives the machine another name, in a namespace that only root can make")
def test_two_ranks_train_on_a_machine_whose_name_does_not_resolve(tmp_path):
    """As in a container, or on a laptop away from home: ranks of one machine meet on loopback."""
    config = replay_config(tmp_path, iterations=1)
    loop = [sys.executable, "-P", "-m", "loop_recipes.cli", "train", str(config), "--nproc-per-node", "2"]
    named = 'hostname nowhere.invalid && ! getent hosts "$(hostname)" && exec "$@"'
    process = subprocess.run(
        ["unshare", "--uts", "sh", "-c", named, "sh", *loop],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": IMPORT_PATH},
    )
    assert process.returncode == 0, process.stdout
    assert [line["iteration"] for line in lines(tmp_path / "run")] == [1]
    ranks = load_training_state(tmp_path / "run/checkpoints/iteration_0001").rng
    assert sorted(ranks) == ["rank0", "rank1"], "two ranks trained, and not one alone"


def test_a_stop_file_that_is_there_at_the_start_ends_every_rank_with_status_0(tmp_path, monkeypatch):
    """Only a job that ends with status 0 is requeued."""
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", "unused")
    config = replay_config(tmp_path, iterations=1, rollout_node={"url": url, "launch": False})
    stop = tmp_path / "run/stop"
    stop.parent.mkdir()
    stop.touch()
    on_ranks(2, run_to_its_end, config, tmp_path)
    said = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert ["stopped while waiting for the rollout node" in text for text in said] == [True, False]
    assert not stop.exists()


def test_ranks_of_which_one_is_asked_twice_to_stop_leave_the_update_together_and_go_on_exactly(tmp_path):
    config, whole, stopped = replay_config(tmp_path, iterations=2), tmp_path / "two", tmp_path / "stopped"
    on_ranks(2, train_into, config, whole)
    on_ranks(2, stopped_in_step, config, tmp_path, 6, f"output_dir={stopped}")
    said = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert ["stopped before step 3 of 4 of iteration 2" in text for text in said] == [True, False]
    assert [path.name for path in (stopped / "checkpoints").iterdir()] == ["iteration_0001"]
    on_ranks(2, train_into, config, stopped, True)
    for file in sorted((whole / "checkpoints/iteration_0002").glob("*.safetensors")):
        assert file.read_bytes() == (stopped / "checkpoints/iteration_0002" / file.name).read_bytes(), file.name


@pytest.mark.parametrize("third", [False, True])
def test_ctrl_c_reaches_ranks_through_torchrun_as_often_as_it_is_pressed(tmp_path, third, request):
    until, output = tmp_path / "until", tmp_path / "output"
    advantage = {"_component_": "support.rank_failure.HeldBack", "folder": str(tmp_path), "until": str(until)}
    config = replay_config(tmp_path, iterations=1, advantage=advantage)
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "loop_recipes.cli", "train", str(config), "--nproc-per-node", "2"],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": IMPORT_PATH},
        )
    request.addfinalizer(process.kill)

    def heard(answer: bytes) -> bool:
        return answer in output.read_bytes() or process.poll() is not None

    ranks = [tmp_path / "rank0", tmp_path / "rank1"]
    block_until(lambda: all(rank.exists() and rank.read_text() for rank in ranks), COMMAND_S)
    for answer in ANSWERS:
        process.send_signal(signal.SIGINT)
        block_until(lambda answer=answer: heard(answer), COMMAND_S)
    if third:
        process.send_signal(signal.SIGINT)
    else:
        until.touch()
    assert process.wait(COMMAND_S) == 1, "torchrun's status, whatever its ranks do"
    block_until(lambda: not any(alive(int(rank.read_text())) for rank in ranks))
    text = output.read_text()
    assert ("stopped while recomputing log-probs" in text) == (not third)
    assert "Traceback" not in text
    assert text.endswith("tune run: stopped\n")


def test_a_rank_that_fails_alone_ends_the_job_with_its_traceback(tmp_path):
    """Rank 1 raises while rank 0 waits for it in a collective, for which it would wait for hours."""
    mark = tmp_path / "failed_at"
    advantage = {"_component_": "support.rank_failure.FailsOnOneRank", "rank": 1, "mark": str(mark)}
    config = replay_config(tmp_path, iterations=1, advantage=advantage)
    process = subprocess.run(
        [*TUNE, "--nproc_per_node", "2", "loop_appworld", "--config", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": IMPORT_PATH},
    )
    output, ended = process.stdout, time.time()
    assert process.returncode != 0
    assert "RuntimeError: rank 1 fails alone" in output
    assert "in __call__" in output, "the traceback leads to where it was raised"
    assert ended - float(mark.read_text()) < DEADLINE_S
