"""Harbor's tasks behind a whole node, in real containers: kills, two attacks by command, an agent's own program.

`tests/drills/harbor.sh` makes the images that HARBOR_IMAGE and HARBOR_AGENT_IMAGE name, and runs this.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from loop_formats.run_files import find_logs, read_rollouts
from loop_formats.schema import from_mapping
from loop_plumbing.process_guard import descendants
from loop_recipes.paths import loop_package
from model_families.chat import open_chat
from rollout_server.config import NodeConfig
from rollout_server.inference.server import free_port
from rollout_server.node_process import NodeProcess
from support import whole_agents
from support.fake_vllm import Sampled
from support.node_reader import TOKEN, Reader, RolloutClient, request
from support.processes import alive
from support.scripted_vllm import ScriptedVllm
from support.texts import texts_beside
from support.waiting import COMMAND_S, block_until

TABLES = texts_beside(Path(__file__).with_name("test_harbor_containers.py"))
pytestmark = [pytest.mark.integration, pytest.mark.drill, pytest.mark.timeout(1800)]
KILLS = 10
IMAGE = os.environ.get("HARBOR_IMAGE")


@pytest.fixture(autouse=True)
def task_folders(tmp_path):
    if IMAGE is None:
        pytest.skip("tests/drills/harbor.sh makes an image, and runs this")
    for name, files in {**TABLES["tasks"], **TABLES["more"]}.items():
        for file, text in {**TABLES["shared"], **files}.items():
            (tmp_path / "tasks" / name / file).parent.mkdir(parents=True, exist_ok=True)
            image = os.environ["HARBOR_AGENT_IMAGE"] if name == whole_agents.TASK else IMAGE
            (tmp_path / "tasks" / name / file).write_text(text.replace("IMAGE", image))
    return tmp_path / "tasks"


def saying(model, commands_of):
    """A vLLM whose policy gives a command that ``commands_of`` draws for the prompt, and ends in its second turn."""
    vllm = ScriptedVllm(open_chat(model))

    async def sample(body):
        prompt, seed = vllm.tokens.decode(body["token_ids"]), body["sampling_params"]["seed"]
        call = {"name": "shell", "arguments": {"command": commands_of(prompt, random.Random(seed))}}
        said = "Done." if "<tool_response>" in prompt else f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        ids = [*vllm.tokens.encode_text(said), vllm.tokens.turn_end]
        return Sampled(ids, [-0.1] * len(ids), "stop")

    vllm.sample = sample
    return vllm


def containers_of(process_id):
    listed = ["podman", "ps", "-a", "--filter", f"name=loop-harbor-{process_id}-", "--format", "{{.Names}}"]
    return subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split()


def kill_one(kind, process, draw):
    """Remove a container of the node, kill a client of podman, or the node, which is started again."""
    if kind == "container" and (names := containers_of(process.pid)):
        subprocess.run(["podman", "rm", "-f", draw.choice(names)], capture_output=True)
    elif kind == "worker" and (below := descendants(process.pid)):
        with suppress(ProcessLookupError):
            os.kill(draw.choice(below), signal.SIGKILL)
    elif kind == "node":
        below = descendants(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        block_until(lambda: not any(map(alive, below)))
        process.start()


def harmed(process, policy, root):
    """Collect while ten things are killed: nothing is lost, nothing comes twice, and each episode is paid.

    Returns the process ids of the nodes.
    """
    client = RolloutClient(process.url, TOKEN, reconnect_s=COMMAND_S)
    RolloutClient(process.url, TOKEN, alive=process.check).wait_ready(COMMAND_S)
    client.publish_policy(0, policy / "adapter0")
    limits = whole_agents.Limits(max_turns=4, max_tokens_per_turn=400, max_context=9000, episode_deadline_s=300.0)
    client.start_collection(request("kills", list(TABLES["tasks"]), rollouts_per_task=KILLS, limits=limits))
    reader, draw, nodes = Reader(client, "kills"), random.Random(1), {process.pid}
    for number in range(KILLS):
        reader.wait_for(2 * number)
        time.sleep(draw.uniform(0.0, 3.0))
        kill_one(("container", "worker", "node")[number % 3], process, draw)
        nodes.add(process.pid)
    rollouts, end = reader.finish()
    print(end.failures, [rollout.attempt for rollout in rollouts])
    assert end.reason == "complete"
    wanted = {(task, index): 1 for task in TABLES["tasks"] for index in range(KILLS)}
    assert Counter((rollout.task_id, rollout.index) for rollout in rollouts) == wanted
    lines = (root / "collections" / "kills.jsonl").read_text().splitlines()
    assert lines == [rollout.to_json() for rollout in rollouts], "what was delivered is what is on disk"
    assert {(rollout.reward, rollout.ungradable) for rollout in rollouts} == {(1.0, None)}
    return nodes


async def test_kills_of_container_worker_and_node_lose_nothing(task_folders, tmp_path):
    policy = whole_agents.write_policy(tmp_path / "policy")
    solutions = {files["instruction.md"]: files["solution/solve.sh"] for files in TABLES["tasks"].values()}
    vllm = saying(
        policy / "model",
        lambda prompt, draw: next("sleep 1\n" + solve for told, solve in solutions.items() if told.strip() in prompt),
    )
    config = {
        "port": free_port(),
        "root": str(tmp_path / "node"),
        "model": {"path": str(policy / "model"), "dtype": "float32", "max_context": 9000, "lora_rank": 8},
        "servers": {"urls": [await vllm.start()], "max_num_seqs": 16},
        "environment": {"name": "harbor", "tasks": str(task_folders), "max_worlds": 3},
        "max_concurrent_episodes": 3,
    }
    with NodeProcess(from_mapping(NodeConfig, config), tmp_path, TOKEN) as process:
        nodes = await asyncio.to_thread(harmed, process, policy, tmp_path / "node")
    await vllm.stop()
    assert [name for node in nodes for name in containers_of(node)] == [], (
        "the node removes what the killed ones have left"
    )


def loop(folder, *words):
    """The output of a command of this project, on the demo's policy."""
    command = [Path(sys.executable).with_name("loop"), *words, "world=harbor", "node.environment.tasks=tasks"]
    own = {"LOOP_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **own}, capture_output=True, text=True, timeout=COMMAND_S
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


SMALL = (
    "collection.tasks_per_iteration=1",
    "collection.rollouts_per_task=4",
    "collection.min_rollouts_per_task=4",
    "collection.limits.max_turns=2",
    "max_iterations=2",
    "output_dir=run",
)


def keep(folder, *names):
    for task in (folder / "tasks").iterdir():
        if task.name not in names:
            task.rename(folder / task.name)


async def test_a_moved_reward_and_an_ended_container_earn_0_in_try_training_and_evaluation(task_folders, tmp_path):
    keep(tmp_path, "write")
    attacks = [
        TABLES["attacks"][name][0] for name in ("reward moved into place again and again", "first process ended")
    ]
    for attack in attacks:
        (task_folders / "write" / "solution" / "solve.sh").write_text(f"#!/bin/bash\n{attack}\n")
        assert "expert earns 0 on" in await asyncio.to_thread(loop, tmp_path, "try", "tiny_cpu")
    vllm = saying(loop_package("tiny_policy"), lambda prompt, draw: draw.choice(attacks))
    servers = f"node.servers.urls=[{await vllm.start()}]"
    turn = "limits.max_tokens_per_turn=400"
    await asyncio.to_thread(loop, tmp_path, "train", "tiny_cpu", *SMALL, f"collection.{turn}", servers)
    scored = await asyncio.to_thread(loop, tmp_path, "eval", "tiny_cpu", "run=run", servers, "limits.max_turns=2", turn)
    await vllm.stop()
    print(scored)
    rollouts = [rollout for log in find_logs(tmp_path / "run") for rollout in read_rollouts(log)]
    assert {(rollout.reward, rollout.attempt) for rollout in rollouts} == {(0.0, 0)}
    assert {rollout.ungradable for rollout in rollouts} == {None, "the agent ended its container"}


def test_the_tiny_policy_is_trained_for_two_iterations(task_folders, tmp_path):
    keep(tmp_path, "coin")
    loop(tmp_path, "train", "tiny_cpu", *SMALL, "collection.limits.max_tokens_per_turn=24")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    print([(line["reward"], line["steps"], line.get("gap_p99")) for line in lines])
    assert len(lines) == 2
    assert all(line["gap_verdict"] == "ok" for line in lines if line["steps"])


PROGRAMS = {
    "mini-swe-agent": "python3 /opt/agent/bin/mini -y --exit-immediately -m openai/policy "
    '--task="$(cat /loop/prompt.md)"',
    "openhands-sdk": "LLM_MODEL=openai/policy LLM_BASE_URL=$OPENAI_BASE_URL LLM_API_KEY=$OPENAI_API_KEY "
    "python3 /opt/agent/openhands_sdk_runner.py --instruction-file=/loop/prompt.md --logs-dir=/logs/agent "
    "--trajectory-path=/logs/agent/trajectory.json",
}
"""Installed agents of Harbor, as Harbor starts them in a container."""


@pytest.mark.parametrize("agent", PROGRAMS)
async def test_an_installed_agent_works_inside_the_container_in_one_sequence(agent, task_folders, tmp_path):
    play = ["{python}", "-m", "loop_contrib.harbor.inside", "bash", "-c", PROGRAMS[agent]]
    world = {"name": "harbor", "tasks": str(task_folders / whole_agents.TASK), "programs": True}
    harness = {"command": play, "world": world, "tasks": None, "task_files": None, "grade_command": None}
    policy, says = whole_agents.write_policy(tmp_path / "policy"), whole_agents.AGENTS[agent].says
    outcome = await whole_agents.play(agent, harness, policy, tmp_path / "episode", lambda folder: says("/app"))
    assert (outcome.sequences, outcome.turns, outcome.reward) == (1, 5, 1.0)
    assert (outcome.end_reason, outcome.exit_status, outcome.refusals) == ("completed", 0, [])
