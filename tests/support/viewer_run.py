"""Writes a small run for the viewer: three iterations, ordinary rollouts, a hostile one and one of 100,000 tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from appworld_adapter.pool.forked import AppWorldPool
from loop_formats.rollout import Rollout, Turn
from loop_formats.run_folder import write_description
from loop_formats.turn_values import TurnValue, values_file
from loop_viewer.run_data import RunData
from model_families.chat.tokenizer import read_tokenizer
from support.random_policy import write_tokenizer
from support.rollouts import rollout as made_up
from support.rollouts import turn as turn_of

opened = partial(RunData, read_tokenizer=read_tokenizer)
"""Opens a run as `loop view` does, with the texts of its tokens."""

SCRIPT = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'></script>"
LONG_LINE = "x" * 300_000
LONE_SURROGATE = "\ud83d broken \udc00"
RIGHT_TO_LEFT = "\u202egnp.exe\u202c"
HOSTILE = "\n".join(
    [SCRIPT, "]]>-->{{7*7}} javascript:alert(1)", LONE_SURROGATE, RIGHT_TO_LEFT, "\x00\x1b[31m", LONG_LINE]
)
LONG_TOKENS = 100_000
FAILURE = {"failure": {"task_id": "task1_1", "index": 0, "attempt": 0, "reason": "environment_crashed"}}
"""Of a collection's meta file; the first iteration's has two."""


def write_run(folder: Path, iterations: int = 3, tasks: int = 4, per_task: int = 6) -> Path:
    """The folder of a run with metrics, collections, token statistics of the first one, and a tokenizer."""
    write_tokenizer(folder / "model")
    (folder / "node/collections").mkdir(parents=True)
    (folder / "token_statistics").mkdir()
    (folder / "rollout_node.yaml").write_text(f"model: {{path: {folder / 'model'}}}\n")
    write_description(folder, AppWorldPool.description)
    rng = random.Random(0)
    for iteration in range(1, iterations + 1):
        name = f"demo-i{iteration:04d}"
        rollouts = [
            ordinary(folder, name, f"task{task}_1", index, rng) for task in range(tasks) for index in range(per_task)
        ]
        if iteration == iterations:
            rollouts += [hostile(folder, name), long(folder, name)]
        lines = [rollout.to_json() + "\n" for rollout in rollouts]
        (folder / f"node/collections/{name}.jsonl").write_text("".join(lines))
        (folder / f"node/collections/{name}.meta.jsonl").write_text(
            "".join(f"{json.dumps(line)}\n" for line in [{"opened": 1}, *([FAILURE] * 2 if iteration == 1 else [])])
        )
        if iteration == 1:
            write_statistics(folder / f"token_statistics/{name}.jsonl", rollouts)
        reward = sum(rollout.reward for rollout in rollouts) / len(rollouts)
        line = {
            "iteration": iteration,
            "dataset": "synthetic-test",
            "rollouts": len(rollouts),
            "reward": reward,
            "success": sum(rollout.success for rollout in rollouts) / len(rollouts),
            "gap_p99": 1e-4,
            "clip_fraction": 0.01 * iteration,
            "kept_fraction": 0.5,
            "seconds_waiting": 9.0,
            "seconds_updating": 4.0,
        }
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    return folder


def write_statistics(file: Path, rollouts: list[Rollout]) -> None:
    """What a trainer might leave: the gap grows with the place in the log, every tenth token is clipped."""
    lines = []
    for place, rollout in enumerate(rollouts, start=1):
        sampled = [p for p, m in zip(rollout.sampler_logprobs, rollout.mask, strict=True) if m]
        lines.append(
            {
                "rollout_id": rollout.rollout_id,
                "advantage": place / 8,
                "old_logprobs": [value - place * 1e-4 for value in sampled],
                "ratios": [1.25] * len(sampled),
                "clipped": [i % 10 == 0 for i in range(len(sampled))],
            }
        )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def ordinary(folder: Path, collection: str, task: str, index: int, rng: random.Random) -> Rollout:
    """A rollout of two to four turns, of which one may fail."""
    turns = []
    for number in range(rng.randint(1, 3)):
        failed = rng.random() < 0.3
        output = "Execution failed. Traceback:\nKeyError: 'token'" if failed else '[{"name": "Ada", "id": 7}]'
        turns.append(
            (f"I look up step {number}.\n```python\nprint(apis.phone.search_contacts(q={number}))\n```", output)
        )
    turns.append(("The task is done.\n```python\napis.supervisor.complete_task()\n```", "Execution successful."))
    reward = rng.choice([0.25, 0.5, 1.0])
    return build(folder, collection, task, index, turns, reward, rng)


def hostile(folder: Path, collection: str) -> Rollout:
    """Everything that could break a page, in every text that an agent or a world can write."""
    turns = [
        (f"{HOSTILE}\n```python\nprint('''{SCRIPT}''')\n```", HOSTILE),
        (f"```py\n{SCRIPT}", "Execution failed. " + SCRIPT),
    ]
    return build(folder, collection, "hostile_1", 0, turns, 0.0, random.Random(1), requirement=SCRIPT)


def long(folder: Path, collection: str) -> Rollout:
    """One rollout of :data:`LONG_TOKENS` tokens, in 40 turns."""
    rng = random.Random(2)
    short = build(folder, collection, "long_1", 0, [("ok", "fine")] * 40, 0.5, rng)
    size = LONG_TOKENS // 40
    token_ids = [rng.randrange(60, 350) for _ in range(LONG_TOKENS)]
    turns = [Turn(i * size + size // 2, (i + 1) * size, 2, "stop", "s", 1.0, 0.1, 2 + 2 * i) for i in range(40)]
    mask = [turns[i // size].start <= i < turns[i // size].end for i in range(LONG_TOKENS)]
    logprobs = [-rng.random() * 3 if sampled else 0.0 for sampled in mask]
    changes = {"token_ids": token_ids, "turns": turns, "mask": mask, "sampler_logprobs": logprobs}
    return replace(short, **changes).validate()


def build(
    folder: Path,
    collection: str,
    task: str,
    index: int,
    pairs: list[tuple[str, str]],
    reward: float,
    rng: random.Random,
    requirement: str = "assert the answer matches.",
) -> Rollout:
    """A valid rollout whose messages and tokens say the same, up to what a tokenizer cannot encode."""
    tokenizer = Tokenizer.from_file(str(folder / "model/tokenizer.json"))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text.encode("utf-8", "replace").decode()[:3000]).ids

    messages = [
        {"role": "system", "content": "You write Python."},
        {"role": "user", "content": f"Task: {task}: do what is asked."},
    ]
    token_ids, turns = encode(messages[1]["content"]), []
    for action, observation in pairs:
        start, sampled = len(token_ids), encode(action)
        token_ids += [*sampled, *encode(observation)]
        failed = observation.startswith("Exec")
        turns.append(turn_of(start, start + len(sampled), 2, len(messages), failed=failed))
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": observation}]
    own = {"collection_id": collection, "task_id": task, "index": index, "seed": index, "dataset": "synthetic-test"}
    own |= {"messages": messages, "reward": reward, "success": reward == 1.0, "seconds": 2.5}
    own["requirements"] = [{"text": requirement, "passed": reward == 1.0, "no_op_pass": False}]
    bare = made_up(token_ids, turns, **own)
    logprobs = [-rng.random() * 2 if sampled else 0.0 for sampled in bare.mask]
    return replace(bare, sampler_logprobs=logprobs).validate()


def write_values(run: Path, rollout: Rollout, rewards: Mapping[int, Sequence[float]]) -> None:
    """The values of turns of a rollout: turn -> the rewards of its continuations."""
    file = values_file(run, rollout.collection_id)
    file.parent.mkdir()
    values = [TurnValue.of(rollout.rollout_id, turn, returns, 0, 0) for turn, returns in rewards.items()]
    file.write_text("".join(json.dumps(asdict(value)) + "\n" for value in values))
