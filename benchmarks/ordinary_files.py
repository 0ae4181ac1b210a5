"""Take task files as different people write them, from `loop try` to an evaluation.

    python benchmarks/ordinary_files.py [--json PATH] [--only WORDS]

The files lie in ``benchmarks/task_files/``. Ten follow the form of public task files, which their first line names; the
form is theirs, the tasks are not. None was changed to pass. Each goes three ways, without a model:

- ``loop try FILE``, whose lines on right answers and on nothing are kept;
- one iteration: the tasks that the sampler draws, four rollouts each by the node's own episodes, half of them by a
  policy that is right and half by one that says "I do not know.";
- an evaluation: two runs of the right policy over the held-out tasks, scored as `loop eval` does.

The right answer is written here for each file (:data:`FILES`), not taken from it. ``first reward`` is the mean of the
rollouts that know nothing, ``right reward`` that of the right ones, ``success`` the evaluation's in percent. ``try`` is
what `loop try` says of right answers. A file that cannot be trained on must be refused in one line by `loop try`, and
the line must say what is written here. The exit status is 1 where a file's verdict is not as expected.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# The root and recipes/ too, because folders of tests/ are called like packages and hide those that are installed.
sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "recipes", "tests"))

from agent_environments.description import description_of
from agent_environments.protocol import EnvironmentPool, create_pool
from agent_environments.tool_calls import ToolCall, render_tool_call
from loop_formats.collection_request import CollectionRequest, Limits
from loop_formats.rollout import Rollout
from loop_recipes.evaluation.scores import TaskResult, score
from loop_recipes.own_task.play import words_as_tokens
from loop_recipes.own_task.training import OwnTask, config_of
from loop_recipes.paths import loop_package
from loop_recipes.rollouts.task_sampler import TaskSampler
from loop_recipes.verbs.try_tasks import main as loop_try
from model_families.chat import open_chat
from model_families.chat.format import ChatFormat
from rollout_server.collecting.collector import Collector, EpisodeKey
from rollout_server.collecting.episode import Episode
from rollout_server.collecting.policy_client import EpisodeFailed
from rollout_server.collecting.policy_sampler import EpisodeServices
from rollout_server.collecting.sampling_client import SamplingClient
from rollout_server.metrics import NodeMetrics
from support.random_policy import write_tokenizer
from support.scripted_policy import ScriptedPolicy

FOLDER = Path(__file__).resolve().parent / "task_files"
ROLLOUTS, RUNS, MESSAGE_CHARACTERS = 4, 2, 100
LIMITS = Limits(max_turns=8, max_tokens_per_turn=2000, max_context=30_000, episode_deadline_s=600.0)
IGNORANT = "I do not know."

Task = Mapping[str, Any]


@dataclass(frozen=True)
class Expected:
    """The expected result of a file: ``turns`` of the right policy, or words of the line that refuses it.

    ``nothing`` is what a rollout that knows nothing earns, ``mcp`` the servers that a config would name.
    """

    turns: Callable[[Task], list[str]] | None = None
    refused: str = ""
    nothing: float = 0.0
    mcp: Mapping[str, Any] | None = None


def from_field(field: str) -> Expected:
    """Expect the text of a field of the task as the right turn."""
    return Expected(lambda task: [str(task[field])])


def call(name: str, /, **arguments: Any) -> str:
    """Write a turn that calls a tool."""
    return render_tool_call(ToolCall(name, arguments))


def equation(task: Task) -> list[str]:
    """Put the numbers of a task of countdown together."""
    first, second, third = task["nums"]
    return [f"<answer>{first} + {second} - {third}</answer>"]


NOTES = {"notes": {"command": [sys.executable, str(FOLDER / "mcp_notes.py")]}}
FILES = {
    "gsm8k": Expected(refused=r"has a field 'answer', but the 'answer' of reward correct is what the agent answered"),
    "gsm8k_renamed": from_field("target"),
    "humaneval": from_field("canonical_solution"),
    "mbpp": from_field("code"),
    "math_boxed": from_field("solution"),
    "mmlu": from_field("letter"),
    "squad": Expected(lambda task: [task["accepted"][-1]]),
    "countdown": Expected(equation),
    "bfcl": Expected(
        lambda task: [call("calculate_area", base=task["ground_truth"]["calculate_area"]["base"][0], height=5)]
    ),
    "trl_rewards": Expected(refused=r"parameter \*\*kwargs must be one that can be passed by name"),
    "product": Expected(
        lambda task: [call("multiply", a=37, b=2), call("answer", value=task["target"])],
    ),
    "random_seeded": from_field("total"),
    "random_unseeded": Expected(refused="gives other tasks at each import"),
    "set_order": Expected(refused="gives other tasks at each import"),
    "set_sorted": from_field("target"),
    "jsonl_blank_lines": Expected(lambda task: [f"It is {task['capital']}."]),
    "neighbour": from_field("target"),
    "numpy_everywhere": Expected(
        lambda task: [
            call("describe", values=[int(value) for value in task["row"]]),
            call("submit", value=float(task["mean"])),
        ]
    ),
    "pydantic_arguments": Expected(
        lambda task: [call("order", items=[{"name": "pear", "count": json.loads(task["wanted"])[0]["count"]}])]
    ),
    "async_tools": Expected(
        lambda task: [call("fetch", name=str(task["id"]).replace("_", "")), call("answer", code=task["code"])]
    ),
    "light_class": Expected(lambda task: [call("switch", room=room) for room, on in task["rooms"].items() if on]),
    "text_game": from_field("secret"),
    "partials": Expected(lambda task: [call("to_dollars", value=1), call("pay", amount=task["expected"])]),
    "money": Expected(lambda task: [call("invoice", number=1), call("total", amount=str(task["amount"]))]),
    "torch_reward": Expected(lambda task: [str(int(task["total"]))]),
    "static_methods": Expected(lambda task: [call("upper", text="a"), call("say", text=task["shout"])]),
    "uuid_ids": from_field("binary"),
    "pandas_rows": Expected(lambda task: [f"In {task['country']}."]),
    "several_rewards": from_field("word"),
    "question_list": Expected(refused="has a 'question' that is not a text"),
    "mcp_files": Expected(lambda task: [call("read_note", number=1), call("answer", text=task["note"])], mcp=NOTES),
}


async def collect(
    pool: EnvironmentPool, tokens: ChatFormat, tasks: list[str], rollouts: int, turns: Callable[[EpisodeKey], list[str]]
) -> list[Rollout]:
    """Collect rollouts by the node's own episodes; raises RuntimeError for one that is lost."""
    request = CollectionRequest("ordinary", tasks, rollouts, 0, limits=LIMITS)
    collector, made = Collector(request), list[Rollout]()

    async def worker() -> None:
        while (key := collector.start_next()) is not None:
            left = iter(turns(key))
            policy: Any = ScriptedPolicy(tokens, lambda _, left=left: next(left, IGNORANT))
            policy_client = SamplingClient(
                request, "scripted", EpisodeServices(pool, tokens, policy, policy, NodeMetrics())
            )
            try:
                made.extend(await Episode(key, collector.draw(key), request, pool, policy_client).run())
            except EpisodeFailed as error:
                raise RuntimeError(f"{key.task_id}: {error.reason}: {error}") from error
            collector.finished(key)

    await asyncio.gather(*(worker() for _ in range(4)))
    return made


@dataclass
class Row:
    """The result of a file."""

    file: str
    first_reward: float | None
    right_reward: float | None
    success: float | None
    tasks: str
    told: str
    verdict: str


async def play(file: Path, expected: Expected, tokens: ChatFormat) -> tuple[float, float, float, str]:
    """Play an iteration and an evaluation; returns mean rewards of ignorant and right rollouts, success, and tasks."""
    assert expected.turns is not None, "a file that is refused plays nothing"
    task = OwnTask.read(file)
    config = config_of(task, loop_package("tiny_policy"), [])
    options = {key: value for key, value in config["node"]["environment"].items() if key != "name"}
    pool: Any = create_pool("tools", {**options, "max_worlds": 4, "mcp": expected.mcp}, words_as_tokens)
    fields = pool.module.tasks
    turns = expected.turns
    try:
        await pool.open()
        description = description_of("tools", pool)
        trained, scored = pool.tasks("train"), pool.tasks(config["eval"]["split"])
        count = config["collection"]["tasks_per_iteration"]
        drawn = TaskSampler(trained, count, 0, description).next()
        made = await collect(
            pool, tokens, drawn, ROLLOUTS, lambda key: [IGNORANT] if key.index % 2 else turns(fields[key.task_id])
        )
        ended = await collect(pool, tokens, scored, RUNS, lambda key: turns(fields[key.task_id]))
    finally:
        await pool.close()
    ignorant, right = ([each.reward for each in made if each.index % 2 == parity] for parity in (1, 0))
    results = [TaskResult.from_rollout(rollout, environment=description) for rollout in ended]
    scores = score(results, environment=description, resamples=200)
    tasks = f"{len(trained)}+{len(scored)}, {count} an iteration"
    return statistics.fmean(ignorant), statistics.fmean(right), scores.success.mean, tasks


def tried(file: Path) -> tuple[int, str, str]:
    """Run `loop try`; returns its status, output and standard error."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = loop_try([str(file), "--tasks", "1"])
    return status, out.getvalue(), errors.getvalue()


def judged(name: str, tokens: ChatFormat) -> Row:
    """Take a file all three ways."""
    expected, file = FILES[name], FOLDER / f"{name}.py"
    status, printed, errors = tried(file)
    row = Row(f"{name}.py", None, None, None, "", "", "")
    if expected.turns is None:
        row.told = " ".join(errors.split()).removeprefix(f"loop try: {file}: ")
        one_line = status == 1 and errors.count("\n") == 1 and re.search(expected.refused, errors)
        row.verdict = "refused in one line" if one_line else "NOT REFUSED" if status == 0 else "REFUSED OTHERWISE"
        return row
    if status != 0:
        row.told, row.verdict = " ".join(errors.split()), "REFUSED"
        return row
    lines = {line.partition(":")[0]: line.partition(":")[2].strip() for line in printed.splitlines()}
    row.told = lines["right"]
    try:
        row.first_reward, row.right_reward, row.success, row.tasks = asyncio.run(play(file, expected, tokens))
    except (RuntimeError, ValueError, OSError) as error:
        row.verdict = f"BROKE: {error}"
        return row
    well = row.first_reward <= expected.nothing and row.right_reward == 1.0 and row.success == 100.0
    idle = lines["nothing"].startswith(f"doing nothing earns {expected.nothing:g} ")
    row.verdict = "trains" if well and idle else "WRONG REWARDS"
    return row


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each file; returns 1 where a verdict is not as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--only", default="", metavar="WORDS", help="files whose names hold one of these words")
    options = parser.parse_args(arguments)
    names = [name for name in FILES if not options.only or any(word in name for word in options.only.split())]
    random.seed(0)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        tokens = open_chat(Path(folder))
        print(f"{'file':24}{'first':>7}{'right':>7}{'success':>9}  {'tasks':24}{'verdict':21}told")
        for name in names:
            row = judged(name, tokens)
            rows.append(row)
            first, right, success = (
                "" if value is None else f"{value:.3g}" for value in (row.first_reward, row.right_reward, row.success)
            )
            message = row.told[:MESSAGE_CHARACTERS]
            print(f"{row.file:24}{first:>7}{right:>7}{success:>9}  {row.tasks:24}{row.verdict:21}{message}", flush=True)
    good = sum(row.verdict in ("trains", "refused in one line") for row in rows)
    print(f"{good} of {len(rows)} files as expected")
    if options.json is not None:
        options.json.write_text(json.dumps({"files": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
