"""The numbers of a run: documented keys, and one JSON line per iteration.

Figures of behaviour are an environment's own (:mod:`agent_environments.description`).

Keys that start with ``seconds`` or are in :data:`MACHINE_KEYS` depend on the machine; all others are reproduced exactly
by a run resumed on the same rollouts (on a CPU).
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_environments.description import DEFAULT_DESCRIPTION, Description, episode_counts
from loop_formats.rollout import Rollout, by_episode, sequence_texts
from loop_formats.run_files import append_to, to_json, write_whole, writing
from loop_formats.run_folder import read_metrics
from loop_formats.schema import ConfigError
from loop_plumbing.breakage import error_line
from loop_plumbing.grouping import grouped

if TYPE_CHECKING:
    from loop_recipes.run.trackers import Trackers

logger = logging.getLogger(__name__)

_PASSES = {
    "pass_at_k": "share of its tasks that any of dev_evaluation.runs rollouts solved; only with several",
    "pass_all_k": "share of its tasks that all of dev_evaluation.runs rollouts solved; only with several",
}
_DEV = (
    *("iteration", "reward", "success", "tasks", "lost"),
    *(f"{name}{end}" for name in _PASSES for end in ("", "_low", "_high")),
)

METRICS: dict[str, str] = {
    "iteration": "number of the iteration, from 1: one collection and one update",
    "policy_version": "version of the policy after the update; it is raised only if a step was taken",
    "policy_lag": "versions between the oldest token trained on and the policy that the update started from",
    "lag_mean": "mean over rollouts of the versions between their oldest token and that policy; only of a stream",
    "lag_p90": "its 90th percentile; only of a stream",
    "open_groups": "groups that were collected or waited when the iteration had its own; only of a stream",
    "queued_groups": "open groups that had not begun; only of a stream",
    **{
        f"given_up_quarter_{number}": f"episodes cut off after {seconds} of its rollouts' seconds; only of a stream"
        for number, seconds in enumerate(("the first quarter", "the second", "the third", "three quarters"), 1)
    },
    "reprefilled_tokens": "prompt tokens that were computed again as a new version took over; only of a stream",
    "dataset": "name of the dataset the tasks are of",
    "rollouts": "finished episodes that were delivered; each is one rollout, unless its agent left several sequences",
    "sequences": "mean sequences per episode: 1 unless the agent rewrites its history (docs/your_own_task.md), it is "
    "shortened (collection.limits.compaction), or its thinking is stripped (docs/chat_formats.md)",
    "dropped_rollouts": "episodes that early stop cut off",
    "all_rollouts": "episodes that were sampled for the iteration: finished, refilled or not, or cut off",
    "all_sampled_tokens": "tokens that were sampled in them, in all",
    "refilled_groups": "tasks that were sampled in place of others without signal (collection.refill_budget)",
    "resting_tasks": "tasks that the next iteration may not take (collection.rest_iterations)",
    "lost_rollouts": "rollouts whose attempts all failed (crashed world, server error): the collection went on without",
    "tasks_left_out": "tasks that have fewer than two rollouts and are not in the update",
    "failed_attempts": "attempts that failed (crashed world, server error)",
    "failed_attempts_worst_task": "of them, those at the task that had the most",
    "ungradable_rollouts": "rollouts that ended in a state which could not be graded, and so have reward 0",
    "broken_rollouts": "rollouts in which the environment itself broke (a step, the grade, the reward); the terminal "
    "says of what, and a share above collection.max_broken_share ends the run",
    "broken_figures": "figures of behaviour that broke and are left out, as the terminal says; only if there are some",
    "reward": "mean reward, from 0 to 1, as the environment's grader gives it",
    "reward_error": "its standard error over tasks, whose rollouts are not independent; only of two tasks or more",
    "success": "share of rollouts whose grader says that the task is solved",
    "success_error": "its standard error over tasks",
    "completed": "share of rollouts that the agent itself ended",
    "turns": "mean agent turns per rollout",
    "tokens": "mean tokens per rollout, prompt and observations included",
    "tokens_max": "longest rollout",
    "sampled_tokens": "mean tokens per rollout that the policy sampled",
    "cut_turns": "share of turns that the limit of tokens ended, and not the policy",
    "stopped_turns": "share of turns that a stop text of their agent ended",
    "failed_turns": "share of turns whose action the environment answered with an error",
    "thinking_tokens": "mean tokens of thinking per turn; only of a model that thinks",
    "cut_in_thinking": "share of turns that ended before their thinking did, by a limit or by the policy itself; "
    "only of a model that thinks",
    "environments": "for each environment: rollouts, reward, success, completed, turns and tokens; only of a mixture",
    "endpoint": "means over episodes: calls answered, repeated and refused, calls and tokens aside, settings not "
    "applied, turns that came back edited (docs/agents.md); only of agent programs",
    "stated": "mean of each reward and metric by name that a grade holds; only where some do (docs/your_own_task.md)",
    "kept_fraction": "share of rollouts whose abs(advantage) is at least update.min_abs_advantage",
    "left_out_rollouts": "rollouts without a sampled token among their first update.max_tokens_per_rollout; only where "
    "that is given",
    "groups": "tasks with at least one rollout",
    "groups_without_signal": "tasks none of whose rollouts was kept",
    "groups_by_solved": "for tasks of which, for instance, 3/8 rollouts were solved: their groups, and those "
    "with_signal, whose returns differ",
    "enough_rollouts": "rollouts of a task with which four of five groups would have signal, of the tasks solved "
    "sometimes: 1 - p^n - (1 - p)^n; only where there are some",
    "advantage_std": "standard deviation of the advantage over all rollouts (with a critic: over all sampled tokens)",
    "steps": "optimizer steps taken",
    "steps_left_out": "steps that update.max_trajectory_log_ratio forbade",
    "loss": "mean over the steps of the minibatch loss",
    "held_out_loss": "mean cross-entropy after it on conversations held out; only of loop sft with held_out",
    "grad_norm": "mean over the steps of the gradient norm before clipping",
    "grad_norm_max": "the largest of them",
    "learning_rate": "learning rate of the update",
    "ratio_p01": "1st percentile of the importance ratio at the loss's level (token, turn or rollout)",
    "ratio_p10": "10th percentile",
    "ratio_p50": "median",
    "ratio_p90": "90th percentile",
    "ratio_p99": "99th percentile",
    "ratio_max": "the largest ratio",
    "clip_fraction": "share of ratios at which the clipped branch was taken",
    "approx_kl": "mean over sampled tokens of r - 1 - log r, against the sampling policy",
    "entropy_estimate": "mean of -log p over sampled tokens, as the sampler reported it",
    "entropy": "mean over kept tokens of the entropy of the distribution they were sampled from, exact; only with "
    "update.exact_entropy",
    "gap_mean": "mean over kept tokens of abs(sampler log-prob - learner log-prob)",
    "gap_p99": "its 99th percentile",
    "gap_max": "its maximum",
    "gap_base": "gap_p99 before the first step, which later ones are compared with; only in half precision",
    "gap_ok": "up to here gap_p99 is ok: sampler_gap.ok, or twice gap_base where that is more; only with gap_base",
    "gap_broken": "above this it is broken: sampler_gap.broken, or eight times gap_base if less; only with gap_base",
    "gap_verdict": "ok, drift or broken; none when nothing was kept",
    "seconds_collecting": "on the rollout node: from the first episode to the end of the collection",
    "seconds_waiting": "the trainer had nothing to do but wait for rollouts",
    "seconds_paced": "at least so long the node had no group to begin: it would only have aged; only of a stream",
    "seconds_recomputing": "old (and reference) log-probs",
    "seconds_updating": "forward, backward and optimizer steps",
    "seconds_publishing": "exporting the adapter that this iteration was sampled with, and having the servers load it; "
    "in the first line of a resumed run only what the servers did not have",
    "seconds": "since the line before, or the start: the checkpoint and dev scores of the iteration before are in it",
    "tokens_per_second": "tokens through forward and backward, per second of updating, all ranks together",
    "model_flops_utilization": "share of device_peak_tflops that model FLOPs of the update make up, recomputation not "
    "counted; only where device_peak_tflops is given",
    "dev_iteration": "the iteration after which the scored policy stood: the one before this line's; in the run's last "
    "line, its own",
    "dev_reward": "mean reward of that policy on dev_evaluation.split",
    "dev_success": "share of its tasks solved, as the environment says it; each task by the mean of its rollouts",
    "dev_tasks": "tasks that these figures are over: those of which a rollout could be had",
    "dev_lost": "rollouts of that evaluation that could not be had, and are in no other figure of it",
    **{f"dev_{name}": text for name, text in _PASSES.items()},
    **{
        f"dev_{name}_{end}": f"the {'lower' if end == 'low' else 'upper'} end of its interval"
        for name in _PASSES
        for end in ("low", "high")
    },
    **{
        f"earlier_dev_{name}": f"dev_{name} of the policy before, where the run's last line has two of them"
        for name in _DEV
    },
    "peak_memory_gib": "peak memory of rank 0's device so far (CUDA only, else 0)",
}
"""Every key of metrics.jsonl and its meaning, beside the environment's figures of behaviour and those of the loss and
of credits, which document their own. A number that is not finite is written as null."""

MACHINE_KEYS = ("tokens_per_second", "model_flops_utilization", "peak_memory_gib")


class RunMetrics:
    """Appends one line per iteration to ``metrics.jsonl`` and passes its numbers to trackers."""

    def __init__(
        self, path: Path, trackers: Trackers | None, after_iteration: int, more_keys: Collection[str] = ()
    ) -> None:
        """Open the file. Remove lines after ``after_iteration``, which are from a run that died before its checkpoint.

        Args:
            more_keys: further keys of a line, which the environment, the loss and credits document.

        Raises:
            ConfigError: the file is damaged; the message names the line.
        """
        self._path, self._trackers = path, trackers
        self._keys = METRICS.keys() | {*more_keys}
        self._lines: list[dict[str, Any]] = []
        with writing(path):
            append_to(path).close()
        if path.stat().st_size:
            try:
                self._lines = [line for line in read_metrics(path) if line["iteration"] <= after_iteration]
            except ValueError as error:
                raise ConfigError(f"resume_from_checkpoint: {error}; remove that line") from error
            self._write_all()

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Write one iteration.

        Raises:
            ConfigError: a key that nobody documents.
        """
        for key in metrics:
            if key not in self._keys:
                raise ConfigError(
                    f"metric {key} is not documented: add it to `figures` of the loss or credit, or to METRICS of "
                    "loop_recipes/run/metrics.py"
                )
        text = to_json(metrics)
        with writing(self._path), append_to(self._path) as file:
            file.write(f"{text}\n")
        self._lines.append(json.loads(text))

    def amend(self, metrics: Mapping[str, Any]) -> None:
        """Add the dev scores of a policy to the last line. Scores of another policy in that line stay, as
        ``earlier_dev_*``."""
        line = self._lines[-1]
        if line.get("dev_iteration", metrics["dev_iteration"]) != metrics["dev_iteration"]:
            line |= {f"earlier_{key}": line[key] for key in metrics if key in line}
        line |= json.loads(to_json(metrics))
        self._write_all()

    def tell(self) -> None:
        """Pass all new lines to the trackers. Call this after the checkpoint is saved, because a tracker must not get a
        line that a resumed run would lack."""
        if self._trackers is not None:
            self._trackers.tell(self._lines)

    def close(self) -> None:
        """Pass the remaining lines to the trackers and close them. Raises nothing."""
        if self._trackers is not None:
            self._trackers.close()

    def _write_all(self) -> None:
        with writing(self._path):
            write_whole(self._path, "".join(f"{to_json(line)}\n" for line in self._lines))


def rollout_metrics(rollouts: list[Rollout]) -> dict[str, Any]:
    """Average over a collection's episodes, in the order of their ids: arrival order must not change the last digit.

    An episode of several sequences counts once, with the turns and tokens of all its sequences.
    """
    rollouts = sorted(rollouts, key=lambda rollout: (rollout.episode_id, rollout.segment))
    first_segments = [rollout for rollout in rollouts if rollout.segment == 0]
    count = len(first_segments)
    sampled = sum(rollout.sampled_tokens for rollout in rollouts)
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    ends = Counter(turn.finish_reason for turn in turns)
    thinking = sum(turn.thinking_tokens for turn in turns)
    thinking_figures = {
        "thinking_tokens": thinking / len(turns),
        "cut_in_thinking": sum(turn.cut_in_thinking for turn in turns) / len(turns),
    }
    return {
        "rollouts": count,
        "sequences": len(rollouts) / count,
        "reward": sum(rollout.reward for rollout in first_segments) / count,
        "success": sum(rollout.success for rollout in first_segments) / count,
        **_errors(first_segments),
        "completed": sum(rollout.end_reason == "completed" for rollout in first_segments) / count,
        "turns": len(turns) / count,
        "tokens": sum(len(rollout.token_ids) for rollout in rollouts) / count,
        "tokens_max": max(len(rollout.token_ids) for rollout in rollouts),
        "sampled_tokens": sampled / count,
        "cut_turns": ends["length"] / len(turns),
        "stopped_turns": ends["cut"] / len(turns),
        "failed_turns": sum(turn.failed for turn in turns) / len(turns),
        **(thinking_figures if thinking else {}),
        **_endpoint(first_segments),
        **_stated(first_segments),
        "entropy_estimate": -sum(sum(rollout.sampler_logprobs) for rollout in rollouts) / sampled,
    }


def _errors(rollouts: list[Rollout]) -> dict[str, float]:
    """Return standard errors of mean reward and success, clustered by task; {} for one task."""
    tasks = {rollout.task_id for rollout in rollouts}
    errors = {}
    for key in ("reward", "success") if len(tasks) > 1 else ():
        apart = dict.fromkeys(tasks, 0.0)
        mean = sum(getattr(rollout, key) for rollout in rollouts) / len(rollouts)
        for rollout in rollouts:
            apart[rollout.task_id] += getattr(rollout, key) - mean
        squares = math.fsum(distance**2 for distance in apart.values()) * len(tasks) / (len(tasks) - 1)
        errors[f"{key}_error"] = squares**0.5 / len(rollouts)
    return errors


def _endpoint(rollouts: list[Rollout]) -> dict[str, dict[str, float]]:
    """Return for each count of calls the mean over the rollouts that programs played."""
    counts = [rollout.extra["harness"]["calls"] for rollout in rollouts if "harness" in rollout.extra]
    names = sorted({name for of in counts for name in of})
    means = {name: sum(of.get(name, 0) for of in counts) / len(counts) for name in names}
    return {"endpoint": means} if means else {}


def _stated(rollouts: list[Rollout]) -> dict[str, dict[str, dict[str, float]]]:
    """Return for each stated reward and metric the mean over the rollouts whose grades state it."""
    values: dict[str, dict[str, list[float]]] = {}
    for rollout in rollouts:
        for kind in ("rewards", "metrics"):
            stated = rollout.extra.get("stated", {})
            for name, value in stated.get(kind, {}).items():
                values.setdefault(kind, {}).setdefault(name, []).append(value)
    means = {kind: {name: sum(of) / len(of) for name, of in by_name.items()} for kind, by_name in values.items()}
    return {"stated": means} if means else {}


def environment_metrics(rollouts: list[Rollout], environment: Description = DEFAULT_DESCRIPTION) -> dict[str, Any]:
    """Return the figures of each environment of a mixture, by name; {} without a mixture."""
    by_environment = grouped((environment.environment_of(rollout.task_id), rollout) for rollout in rollouts)
    if by_environment.keys() <= {""}:
        return {}
    keys = ("rollouts", "reward", "success", "completed", "turns", "tokens")
    means = {name: rollout_metrics(by_environment[name]) for name in sorted(by_environment)}
    return {"environments": {name: {key: figures[key] for key in keys} for name, figures in means.items()}}


def behavior_metrics(rollouts: list[Rollout], environment: Description = DEFAULT_DESCRIPTION) -> dict[str, float]:
    """Compute figures of behaviour from messages; undefined ones, and rollouts without messages, are left out.

    A figure whose computing raises does not end the run: it is left out, counted and logged.
    """
    with_text = by_episode(rollout for rollout in rollouts if rollout.messages)
    episodes = grouped((behavior, each) for each in with_text for behavior in environment.behaviors(each[0].task_id))
    metrics: dict[str, float] = {}
    broken = 0
    for behavior, concerned in episodes.items():
        try:
            counts = [episode_counts(behavior, sequence_texts(sequences)) for sequences in concerned]
            values = {figure.key: figure.value(counts) for figure in behavior.figures}
        except Exception as error:
            broken += 1
            logger.warning("the figures of %s could not be computed: %s", behavior.name, error_line(error))
            continue
        metrics |= {key: value for key, value in values.items() if value is not None}
    return metrics | ({"broken_figures": broken} if broken else {})


SUMMARY_WORDS = (
    "kept: rollouts that the update learns from, those of tasks whose rewards differ; steps: of the optimizer; clip: "
    "share of tokens whose ratio was clipped; gap: 99th percentile of how far the sampler's log-probs are from the "
    "learner's; left: time until the last iteration"
)
"""Explanation of the words of :func:`summary_line`, printed once before the first."""


def summary_line(metrics: Mapping[str, Any], max_iterations: int) -> str:
    """Describe an iteration in one line, with two blanks between the parts."""
    gap = f"gap {metrics['gap_p99']:.1e} {metrics['gap_verdict']}" if "gap_p99" in metrics else "gap -"
    gap += f" (at first {metrics['gap_base']:.1e})" if "gap_base" in metrics else ""
    to_come = max_iterations - metrics["iteration"]
    left = f"  left {metrics.get('seconds', 0.0) * to_come / 60:.0f} min" if to_come > 0 else ""
    return (
        f"iteration {metrics['iteration']:3d}/{max_iterations}  reward {metrics['reward']:.3f}  "
        f"success {metrics['success']:.3f}  kept {round(metrics['kept_fraction'] * metrics['rollouts'])}/"
        f"{metrics['rollouts']}  steps {metrics['steps']}  clip {metrics.get('clip_fraction', 0.0):.3f}  {gap}  "
        f"collecting {metrics['seconds_collecting']:.1f}s  "
        f"updating {metrics['seconds_recomputing'] + metrics['seconds_updating']:.1f}s{left}"
    )
