"""Drill: from 50 conversations to a served policy by five commands, in a folder with nothing else.

make drills K=chats_to_server
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loop_formats.run_files import find_logs, newest_adapter, read_rollouts
from loop_recipes.export.comparison import LogprobDifference, sampled_logprobs, stored_samples
from loop_recipes.export.policy import config_of_run
from loop_recipes.paths import loop_package
from model_families.chat.tokenizer import TextTokens, read_tokenizer
from support.experiment_scripts import load_script
from support.plain_server import plain_server
from support.waiting import COMMAND_S

pytestmark = [pytest.mark.integration, pytest.mark.drill, pytest.mark.timeout(3600)]
QUEST = Path(__file__).parents[2] / "examples/quest.py"
MODEL = loop_package("tiny_policy")
SMALL = ("collection.tasks_per_iteration=2", "collection.rollouts_per_task=4", "collection.min_rollouts_per_task=4")


def made_chats(count):
    """Conversations in which the quest is played as its ``solve`` says."""
    quest = load_script("examples/quest.py")
    for task in quest.TASKS[:count]:
        house, messages, said = quest.House(), [], task["question"]
        house.reset(task)
        for room in quest.solve(task):
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": room}]
            said = house.go(room)
        yield {"messages": messages}


def served_lines(output):
    return [line.removeprefix("serve:").strip() for line in output.splitlines() if line.startswith("serve:")]


def test_fifty_conversations_become_a_served_policy_by_five_commands(tmp_path):
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in made_chats(50)))
    shutil.copy(QUEST, tmp_path)

    def loop(*words):
        program = Path(sys.executable).with_name("loop")
        environment = {**os.environ, "LOOP_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
        command = [program, *map(str, words)]
        found = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=COMMAND_S
        )
        assert found.returncode == 0, f"{found.stdout[-2000:]}\n{found.stderr[-3000:]}"
        return found.stdout

    learning = ("max_iterations=6", "optimizer.lr=0.01", "held_out=0.1")
    loop("sft", "cpu", f"model.path={MODEL}", "data=chats.jsonl", "output_dir=sft", *learning)
    losses = [json.loads(line)["held_out_loss"] for line in (tmp_path / "sft/metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    begun = f"initial_adapter={newest_adapter(tmp_path / 'sft')}"
    loop("train", "quest.py", "--model", MODEL, begun, "output_dir=run", "max_iterations=3", *SMALL)
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    adapter, merged = (served_lines(loop("export", "run", *words)) for words in ((), ("merge=fp32",)))
    samples = stored_samples(run, 16, 1024)
    policy, base = sampled_logprobs(config_of_run(run)[1], samples, newest_adapter(run))
    assert LogprobDifference.between(policy, base).most > 0.1, (
        "training changed nothing, so the comparison says nothing"
    )
    print(f"held-out loss {losses[0]:.3f} to {losses[-1]:.3f}; rewards {[line['reward'] for line in lines]}")
    for name, serve in (("adapter", adapter[0]), ("merged", merged[0])):
        with plain_server(serve, tmp_path / f"{name}.log") as server:
            apart = LogprobDifference.between(server.logprobs(samples), policy)
        print(f"{name}: served log-probs of {len(policy)} tokens: {apart} from the run's")
        assert apart.most < 1e-3
    text = TextTokens(read_tokenizer(MODEL))
    turns = [
        rollout.token_ids[turn.start : turn.end - (turn.finish_reason == "stop")]
        for log in find_logs(run / "node")
        for rollout in read_rollouts(log)
        for turn in rollout.turns
    ]
    other = sum(text.encode_text(text.decode(ids)) != ids for ids in turns)
    print(f"{other} of {len(turns)} sampled turns have other ids when their texts are encoded again")
    assert 0 < other < len(turns)
