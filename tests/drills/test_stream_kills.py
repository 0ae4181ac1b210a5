"""Drill: the trainer of a stream is killed by SIGKILL at 20 drawn points, and goes on each time.

    make drills K=stream_kills

The node is a whole one over HTTP, the counter environment and a scripted server, which holds each group's first turn
until its iteration has come. So turns of two versions are in each group, and the clock does not choose the groups: a
run that nobody killed has the same ones, and bit for bit the same adapters.
"""

import random

import pytest
from omegaconf import OmegaConf
from torch.multiprocessing import ProcessExitedException

from loop_formats.ids import parse_collection_id
from loop_formats.run_files import STREAM_FILE, find_logs, read_lines, read_rollouts
from loop_formats.run_folder import read_metrics
from support.counter_node import TOKEN, local_node
from support.deaths import deterministic
from support.rank_failure import PLACES, train_to_a_place
from support.ranks import on_ranks
from support.refilled_runs import adapters
from support.small_runs import config_over
from support.waiting import DEADLINE_S

pytestmark = [pytest.mark.integration, pytest.mark.drill, pytest.mark.timeout(1800)]

TOKEN_ENV = "LOOP_TEST_TOKEN"
ITERATIONS, TASKS, ROLLOUTS, LAG, KILLS = 9, 3, 4, 2, 20
AT_FIRST = TASKS * (LAG + 1)
"""Groups that are open before the first update."""
IN_TURN = random.Random(0).sample(range(AT_FIRST), AT_FIRST)
"""The order in which the first groups may end; later ones end in the order in which they are opened."""


async def trained(policy, folder, *kills):
    """A run that is killed at each of ``kills`` and goes on. Returns what it left, by kind, and the places that its
    last process came to."""

    def released(body):
        """The trainer has opened all groups that it may, and the group's iteration takes what is whole."""
        newest, opened = min(local.node.policies.latest(), ITERATIONS - 1), len(local.node.collections())
        group = parse_collection_id(body["request_id"].partition("/")[0]).group
        turn = IN_TURN.index(group) if group < AT_FIRST else group
        return opened >= AT_FIRST + TASKS * newest and turn < TASKS * (newest + 1)

    node = {"publish": False, "max_concurrent_episodes": 100, "servers": {"max_loras": LAG + 2}}
    async with local_node(policy, folder / "node", **node) as local:
        local.vllm.answers, local.vllm.load_metrics["num_requests_running"] = released, 1.0
        file = config_over(local.url, policy, folder, TOKEN_ENV, DEADLINE_S)
        cfg = OmegaConf.load(file)
        cfg.sampler_gap = {"ok": 1e6, "broken": 1e6}  # what the scripted servers claim is made up
        cfg.advantage = {"_component_": "support.small_runs.ByPosition"}
        cfg |= {"max_iterations": ITERATIONS, "resume_from_checkpoint": True}
        cfg.collection.tasks = [f"reach{goal}_{number}" for goal in (3, 5, 8, 12) for number in (1, 2, 3)]
        cfg.collection |= {"stream": True, "max_policy_lag": LAG, "tasks_per_iteration": TASKS}
        cfg.collection |= {
            "rollouts_per_task": ROLLOUTS,
            "min_rollouts_per_task": ROLLOUTS,
        }  # or the clock cuts some off
        OmegaConf.save(cfg, file)
        for place, time, delay_s in kills:
            with pytest.raises(ProcessExitedException, match="SIGKILL"):
                await local.call(on_ranks, 1, train_to_a_place, file, place, time, delay_s)
            saved = len(read_metrics(folder / "run"))
            print(
                f"killed: {place}, time {time + 1}, {1000 * delay_s:.0f} ms later; {saved} iterations logged",
                flush=True,
            )
        reached = await local.call(on_ranks, 1, train_to_a_place, file)
        attempts = {body["request_id"].rpartition("-")[0] for body in local.vllm.requests}
    lines = [line.record for line in read_lines(folder / "run" / STREAM_FILE)]
    left = {
        "opened": [line["request"] for line in lines if "opened" in line],
        "taken": [line["taken"] for line in lines if "taken" in line],
        "rollouts": {
            log.stem: sorted((each.rollout_id, each.token_ids, each.policy_versions) for each in read_rollouts(log))
            for log in find_logs(folder / "node")
        },
        "metrics": deterministic(folder / "run/metrics.jsonl"),
        "adapters": adapters(folder / "run"),
        "attempts": attempts,
    }
    return left, reached


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv(TOKEN_ENV, TOKEN)


async def test_nothing_is_lost_or_taken_twice_wherever_the_trainer_is_killed(policy, tmp_path, token):
    whole, reached = await trained(policy, tmp_path / "whole")
    names = [each["group"] for each in whole["taken"]]
    assert len(names) == len(set(names)) == TASKS * ITERATIONS
    assert max(len(each["versions"]) for each in whole["taken"]) == 2
    assert len(whole["adapters"]) == ITERATIONS + 1
    kills = []
    for number in range(KILLS):
        chance, place = random.Random(number), list(PLACES)[number % len(PLACES)]
        in_iteration = reached[place] // ITERATIONS
        time = chance.randrange(in_iteration) + in_iteration * (chance.random() < 0.3)
        kills.append((place, time, chance.uniform(0.0, 0.05) * (number >= len(PLACES))))
    left, _ = await trained(policy, tmp_path / "killed", *kills)
    assert not [kind for kind, found in left.items() if found != whole[kind]]
