"""Results of `loop train` on a game, and whether transformers sees the policy that vLLM saw.

    loop init my_game
    loop train my_game.py --model models/SmolLM2-135M-Instruct output_dir=runs/game_1 seed=1
    loop train my_game.py --model models/SmolLM2-135M-Instruct output_dir=runs/game_control seed=1 \\
        advantage=loop_recipes.algorithm.advantages.Shuffled
    loop train examples/quest.py --model models/SmolLM2-135M-Instruct output_dir=runs/quest_1 seed=1 max_iterations=15
    python experiments/games.py runs/game_1 runs/game_control [--json experiments/results/number_game.json]
    python experiments/games.py runs/quest_1 runs/quest_2 --against runs/quest_imitation_1 runs/quest_imitation_2
    python experiments/games.py --start none,sft --seeds 3 --game examples/quest.py \\
        --model models/SmolLM2-135M-Instruct --output runs/starts max_iterations=15

The table of a run that still goes on has the rows so far. The last rows of a run load the base model with PEFT and the
adapter that sampled the last whole iteration, if it was kept, and recompute the log-probs of its stored tokens: the
difference to what vLLM said when it sampled them. ``--against`` names runs of the same seeds, which drew the same
tasks: the difference of training rewards, task by task, over all iterations and over the last ones, and of held-out
success after training.

``--start`` trains by itself, each seed from each start: the model as it is (``none``), or after imitation of what the
game's ``solve`` says on the tasks that are trained on (``sft``). Its rows are the held-out success before and after
LOOP, over the seeds; those before LOOP are the result of the start alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from peft import PeftModel
from scored_runs import WINDOW, joined, number
from torch import Tensor
from transformers import AutoModelForCausalLM

from agent_environments.protocol import Message
from loop_formats.ids import parse_collection_id
from loop_formats.rollout import Rollout
from loop_formats.run_files import find_logs, newest_adapter, read_rollouts, write_whole
from loop_formats.run_folder import read_metrics
from loop_recipes.evaluation.comparison import compare
from loop_recipes.evaluation.report import read_report
from loop_recipes.evaluation.scores import NamedResults, TaskResult
from loop_recipes.evaluation.statistics import Difference, paired_difference
from loop_recipes.own_task.play import Played, play_task
from loop_recipes.own_task.training import OwnTask
from loop_recipes.steps import run_step
from model_families.chat.tokenizer import TextTokens, read_tokenizer

COMPARED = 16
"""Rollouts whose log-probs are recomputed."""
SECONDS = ("seconds", "seconds_collecting", "seconds_updating")
"""Metrics of which the mean over the iterations is a row."""
MICRO = 1e6
"""Millionths in a unit: the differences of two programs in float32 are a few of them."""


def curve(run: Path) -> list[dict[str, Any]]:
    """Return rows of the iterations that are there."""
    lines = read_metrics(run)
    mean = statistics.mean
    rows = [number(run.name, "iterations", len(lines), "")]
    for name, some in (("first", lines[:WINDOW]), ("last", lines[-WINDOW:])):
        rows.append(number(run.name, f"reward_{name}_{len(some)}", mean(line["reward"] for line in some), ""))
    rows += [number(run.name, name, mean(line[name] for line in lines), "s") for name in SECONDS]
    stepped = [line for line in lines if "gap_mean" in line]
    gaps = {"gap_mean": mean(line["gap_mean"] for line in stepped), "gap_p99": max(line["gap_p99"] for line in stepped)}
    rows += [number(run.name, name, MICRO * gap, "1e-6 nats") for name, gap in gaps.items()]
    return rows


def scores(run: Path) -> list[dict[str, Any]]:
    """Return rows of the evaluation on held-out tasks, in percent with its interval; empty before it."""
    file = run / "evaluation/report.json"
    if not file.exists():
        return []
    rows = []
    for each in json.loads(file.read_text(encoding="utf-8"))["scores"]:
        case = f"{run.name} {each['policy']} {each['sampling']['label']}"
        rows.append(number(case, "success", each["success"]["mean"], "%"))
        rows += [number(case, f"success_{end}", each["success"]["interval"][end], "%") for end in ("low", "high")]
    return rows


def sampled(run: Path) -> list[list[Rollout]]:
    """Return the rollouts of each iteration of training, in order."""
    logs = [log for log in find_logs(run / "node") if not parse_collection_id(log.stem).dev]
    return [rollouts for log in logs if (rollouts := read_rollouts(log))]


def tokens(run: Path, rollouts: Sequence[Rollout], model: Path) -> list[dict[str, Any]]:
    """Return rows of the tokens, such as the share of turns whose text encodes to other ids than were served."""
    text = TextTokens(read_tokenizer(model))
    spans = [
        rollout.token_ids[turn.start : turn.end - (turn.finish_reason == "stop")]
        for rollout in rollouts
        for turn in rollout.turns
    ]
    other = sum(text.encode_text(text.decode(ids)) != ids for ids in spans)
    mean = statistics.mean
    return [
        number(run.name, "tokens_an_episode", mean(len(rollout.token_ids) for rollout in rollouts), "tokens"),
        number(run.name, "sampled_an_episode", mean(rollout.sampled_tokens for rollout in rollouts), "tokens"),
        number(run.name, "sampled_tokens", sum(rollout.sampled_tokens for rollout in rollouts), "tokens"),
        number(run.name, "turns", len(spans), "turns"),
        number(run.name, "turns_that_encode_to_other_ids", 100 * other / len(spans), "%"),
    ]


def logprobs(model: Any, rollout: Rollout) -> Tensor:
    """Return the log-probs [s - 1] of the tokens of a rollout but for the first, at temperature 1."""
    ids = torch.tensor([rollout.token_ids])
    with torch.inference_mode():
        logits = model(ids).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def differences(model: Any, rollouts: Iterable[Rollout]) -> Tensor:
    """Return the absolute difference [n] between a model's log-prob of each sampled token and the sampler's."""
    parts = []
    for rollout in rollouts:
        mask = torch.tensor(rollout.mask)[1:]
        parts.append((logprobs(model, rollout) - torch.tensor(rollout.sampler_logprobs)[1:])[mask].abs())
    return torch.cat(parts)


def in_transformers(run: Path, rollouts: Sequence[Rollout], model: Path) -> list[dict[str, Any]]:
    """Return rows of the comparison with transformers and PEFT, over rollouts that one version sampled."""
    (version,) = {version for rollout in rollouts for version in rollout.policy_versions}
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    untrained = differences(base, rollouts)
    trained = differences(PeftModel.from_pretrained(base, run / f"policies/policy-v{version:04d}"), rollouts)
    case = f"{run.name} version {version} in transformers"
    return [
        number(case, "difference_mean", MICRO * float(trained.mean()), "1e-6 nats"),
        number(case, "difference_max", MICRO * float(trained.max()), "1e-6 nats"),
        number(case, "difference_mean_without_adapter", MICRO * float(untrained.mean()), "1e-6 nats"),
    ]


def table(run: Path) -> list[dict[str, Any]]:
    """Return all rows of a run."""
    model = Path(OmegaConf.load(run / "config.yaml").model.path)
    iterations = sampled(run)[: len(read_metrics(run))]
    rollouts = [rollout for iteration in iterations for rollout in iteration]
    rows = [*curve(run), *scores(run), *tokens(run, rollouts, model)]
    if (run / "policies").exists():
        rows += in_transformers(run, iterations[-1][:COMPARED], model)
    return rows


def task_rewards(run: Path) -> dict[tuple[int, str], float]:
    """Return each task's mean reward in each iteration, by the iteration's number, from 0, and the task's id."""
    rewards_of: dict[tuple[int, str], list[float]] = {}
    for iteration, rollouts in enumerate(sampled(run)):
        for rollout in rollouts:
            rewards_of.setdefault((iteration, rollout.task_id), []).append(rollout.reward)
    return {key: statistics.mean(rewards) for key, rewards in rewards_of.items()}


def differences_of_reward(runs: Sequence[Path], others: Sequence[Path]) -> list[dict[str, Any]]:
    """Return rows of the mean difference to runs of the same seeds, in percentage points; a cluster is a task."""
    pairs: dict[tuple[str, int, str], float] = {}
    for run, other in zip(runs, others, strict=True):
        theirs = task_rewards(other)
        pairs |= {(run.name, *key): ours - theirs[key] for key, ours in task_rewards(run).items() if key in theirs}
    last = max(iteration for _, iteration, _ in pairs)
    rows = []
    for name, first in (("all", 0), (f"last_{WINDOW}", last - WINDOW + 1)):
        chosen = {" ".join(map(str, key)): value for key, value in pairs.items() if key[1] >= first}
        difference = paired_difference(chosen, lambda key: key.rpartition(" ")[2]).scaled(100)
        rows += difference_rows(_names(runs, others), f"reward_difference_{name}", difference)
    return rows


def after_training(run: Path) -> dict[str, Sequence[TaskResult]]:
    """Return the held-out results of a run's last policy, by way of sampling; none without an evaluation."""
    if not (run / "evaluation").exists():
        return {}
    return {each.sampling: each.results for each in read_report(run / "evaluation")[1] if each.name == "after"}


def differences_of_success(runs: Sequence[Path], others: Sequence[Path]) -> list[dict[str, Any]]:
    """Return rows of the difference in held-out success, all seeds together, for each way of sampling that all have."""
    sides = [list(map(after_training, side)) for side in (others, runs)]
    rows = []
    for sampling in sides[0][0]:
        if all(sampling in each for side in sides for each in side):
            theirs, ours = (NamedResults("", sampling, joined(each[sampling] for each in side)) for side in sides)
            rows += difference_rows(
                _names(runs, others), f"success_difference {sampling}", compare(theirs, ours).success
            )
    return rows


def difference_rows(case: str, metric: str, difference: Difference) -> list[dict[str, Any]]:
    """Return rows of a difference in percentage points, its interval and its p-value."""
    interval = difference.interval
    ends = {"": interval.estimate, "_low": interval.low, "_high": interval.high}
    rows = [number(case, f"{metric}{end}", value, "%") for end, value in ends.items()]
    return [*rows, number(case, f"{metric}_p", 1e4 * difference.p_value, "1e-4")]  # four digits are kept


STARTS = ("none", "sft")
IMITATION = ("max_iterations=3", "held_out=0.1")


def solved_chats(file: Path) -> list[dict[str, Any]]:
    """Return the conversations in which a game's ``solve`` plays the tasks that are trained on, if they earn all of
    the reward."""
    task = OwnTask.read(file)

    async def solving(environment: Any, messages: list[Message]) -> str | None:
        turn: str | None = await environment.right_turn(messages[-1].content)
        return turn

    async def play() -> list[Played]:
        pool = task.pool()
        try:
            await pool.open()
            return [await play_task(pool, task_id, solving) for task_id in task.trained]
        finally:
            await pool.close()

    played = [each for each in asyncio.run(play()) if each.grade.reward >= 1.0]
    return [{"messages": [{"role": m.role, "content": m.content} for m in each.messages]} for each in played]


def trained(game: Path, model: Path, starts: Sequence[str], seeds: int, output: Path, words: Sequence[str]) -> None:
    """Train each seed from each start, as ``<output>/<start>_<seed>``; a run that is there goes on."""
    loop = str(Path(sys.executable).with_name("loop"))
    output.mkdir(parents=True, exist_ok=True)
    if "sft" in starts:
        chats = write_whole(output / "chats.jsonl", "".join(f"{json.dumps(chat)}\n" for chat in solved_chats(game)))
    for seed in range(1, seeds + 1):
        for start in starts:
            begins = []
            if start == "sft":
                imitation = output / f"imitation_{seed}"
                if newest_adapter(imitation) is None:
                    named = [f"model.path={model}", f"data={chats}", f"output_dir={imitation}", f"seed={seed}"]
                    run_step([loop, "sft", "cpu", *named, *IMITATION], None)
                begins = [f"initial_adapter={newest_adapter(imitation)}"]
            named = [f"output_dir={output / f'{start}_{seed}'}", f"seed={seed}", *begins]
            run_step([loop, "train", str(game), "--model", str(model), *named, *words], None)


def success_by_start(starts: Sequence[str], seeds: int, output: Path) -> list[dict[str, Any]]:
    """Return rows of each start's held-out success, before and after LOOP: mean, least and most over the seeds."""
    by_case: dict[str, list[float]] = {}
    for start in starts:
        for seed in range(1, seeds + 1):
            report, _ = read_report(output / f"{start}_{seed}/evaluation")
            for each in report["scores"]:
                what = {"before": start, "after": f"{start} then LOOP"}.get(each["policy"], each["policy"])
                by_case.setdefault(f"{what} {each['sampling']['label']}", []).append(each["success"]["mean"])
    rows = []
    for case, values in by_case.items():
        rows.append(number(case, "success", statistics.mean(values), "%"))
        rows += [number(case, "success_least", min(values), "%"), number(case, "success_most", max(values), "%")]
    return rows


def _names(runs: Sequence[Path], others: Sequence[Path]) -> str:
    return f"{', '.join(run.name for run in runs)} against {', '.join(run.name for run in others)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="output folder of a training run; or words of --start")
    parser.add_argument("--start", help="train from these starts: none, sft or none,sft")
    parser.add_argument("--seeds", type=int, default=3, help="with --start: runs of each (3)")
    parser.add_argument("--game", type=Path, help="with --start: the game's file, which has a solve")
    parser.add_argument("--model", type=Path, help="with --start: the model's folder")
    parser.add_argument("--output", type=Path, default=Path("runs/starts"), help="with --start: where the runs go")
    parser.add_argument("--against", type=Path, nargs="+", default=[], help="a run of each one's seed")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    if options.against and (options.start or len(options.against) != len(options.runs)):
        parser.error(f"--against names {len(options.against)} runs, but there are {len(options.runs)}")
    if options.start is None:
        runs = [Path(run) for run in options.runs]
        if gone := [str(run) for run in runs if not (run / "config.yaml").is_file()]:
            parser.error(f"{', '.join(gone)}: no folder of a run, which holds config.yaml; train it first")
        rows = [row for run in runs for row in table(run)]
        if not runs:
            parser.error("name the runs, or give --start")
    else:
        starts = options.start.split(",")
        if not (options.game and options.model and {*starts} <= {*STARTS}):
            parser.error("--start takes none, sft or none,sft, and needs --game and --model")
        trained(options.game, options.model, starts, options.seeds, options.output, options.runs)
        rows = success_by_start(starts, options.seeds, options.output)
    if options.against:
        rows += differences_of_reward(runs, options.against)
        rows += differences_of_success(runs, options.against)
    print("| case | figure | |\n|---|---|---|")
    for row in rows:
        print(f"| {row['case']} | {row['metric']} | {row['value']:.4g} {row['unit']} |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
