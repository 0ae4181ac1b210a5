"""Reads a run's metrics and prints a line for each fault, with the figure and the page.

    loop doctor runs/demo

It reads the last five iterations, and for trends all of them. It ends with 1 if there is a fault. It also prints how
many groups of rollouts had signal, by how often their tasks are solved, and what would give signal to more. All
figures are from ``metrics.jsonl``; `loop view` shows the rollouts behind them.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loop_formats.run_folder import read_metrics
from loop_recipes.config.arguments import verb_parser
from loop_recipes.plan.signal_report import forecast, signal_text, together
from loop_recipes.terminal import say

Lines = Sequence[Mapping[str, Any]]

RECENT = 5
"""Number of last iterations that describe a run's present state."""
FEWEST_FOR_A_TREND = 6
LARGEST = 1e100
"""Largest value to compute with: its square is a finite float, too."""
PAGE = "docs/troubleshooting.md"


@dataclass(frozen=True)
class Finding:
    """A problem of a run: the symptom with its figure, the meaning or cure, and the section of the page."""

    symptom: str
    cure: str
    section: str

    def __str__(self) -> str:
        return f"{self.symptom}: {self.cure} ({PAGE}#{self.section})"


def no_signal(lines: Lines) -> Finding | None:
    """Find groups without signal: all rollouts of most tasks earn the same, so that few of them teach anything."""
    recent = lines[-RECENT:]
    groups, idle = (sum(_numbers(recent, key)) for key in ("groups", "groups_without_signal"))
    if not groups or idle <= 0.8 * groups:
        return None
    reward = _mean(recent, "reward") or 0.0
    cure = (
        "the tasks are too hard, or the reward too strict; demonstrations first (loop sft), or a reward with degrees"
        if reward < 0.5
        else "the tasks are too easy; take harder ones"
    )
    return Finding(
        f"no signal in {idle:.0f} of {groups:.0f} groups of rollouts (mean reward {reward:.3f})",
        cure,
        "it-does-not-learn",
    )


def no_grade(lines: Lines) -> Finding | None:
    """Find rollouts whose reward is 0 because nothing graded them, not because the agent failed."""
    recent = lines[-RECENT:]
    ungradable, broken, every = (
        sum(_numbers(recent, key)) for key in ("ungradable_rollouts", "broken_rollouts", "rollouts")
    )
    if ungradable + broken <= 0.1 * every:
        return None
    symptom = f"of {every:.0f} rollouts {ungradable:.0f} could not be graded, and in {broken:.0f} the environment broke"
    return Finding(symptom, "loop view RUN --text TASK shows the reason of each", "the-reward-is-0")


def broken_gap(lines: Lines) -> Finding | None:
    """Find a gap: sampler and learner disagree about the same tokens."""
    verdicts = [line.get("gap_verdict") for line in lines[-RECENT:]]
    worst = next((verdict for verdict in ("broken", "drift") if verdict in verdicts), None)
    if worst is None:
        return None
    largest = max(_numbers(lines[-RECENT:], "gap_p99"), default=0.0)
    base = _mean(lines[-1:], "gap_base")
    before = "" if base is None else f", before the first step {base:.2g}"
    text = f"the gap of sampler and learner is called {worst} in {verdicts.count(worst)} of {len(verdicts)} iterations"
    figures = f"(99th percentile up to {largest:.2g} nats{before})"
    return Finding(f"{text} {figures}", "compare weights and dtypes", "the-gap-drifts")


def cut_turns(lines: Lines) -> Finding | None:
    """Find episodes, turns or thoughts that limits end, and not the agent."""
    recent = lines[-RECENT:]
    thinking, completed = _mean(recent, "cut_in_thinking"), _mean(recent, "completed")
    if thinking is not None and thinking > 0.1:
        cure = "raise collection.limits.max_thinking_tokens or max_tokens_per_turn"
        return Finding(f"{thinking:.0%} of the turns are cut inside their thinking", cure, "the-reward-is-0")
    cut = _mean(recent, "cut_turns")
    if cut is not None and cut > 0.1:
        cure = "raise collection.limits.max_tokens_per_turn, unless what was cut off says nothing more"
        return Finding(f"{cut:.0%} of the turns are cut by the limit of tokens", cure, "it-does-not-learn")
    if completed is not None and completed < 0.5:
        cure = "raise collection.limits, or begin with collection.horizons"
        return Finding(f"only {completed:.0%} of the episodes are ended by the agent", cure, "it-does-not-learn")
    return None


def failing_calls(lines: Lines) -> Finding | None:
    """Find calls of the agent that reach no tool, or whose tool fails."""
    kinds = {
        "tool_calls_bad": ("cannot be read", "the model writes calls in another form; demonstrations first (loop sft)"),
        "tool_calls_unknown": ("name no tool", "say in the instructions which tools there are"),
        "tool_calls_wrong_arguments": ("have wrong arguments", "describe the parameters in the tool's docstring"),
        "tool_calls_failed": ("fail in the tool or take too long", "try the tool by itself (loop try)"),
    }
    shares = {key: _mean(lines[-RECENT:], key) or 0.0 for key in kinds}
    key = max(shares, key=lambda name: shares[name])
    if shares[key] <= 0.3:
        return None
    return Finding(f"{shares[key]:.0%} of the tool calls {kinds[key][0]} ({key})", kinds[key][1], "the-reward-is-0")


def hollow_reward(lines: Lines) -> Finding | None:
    """Find a reward that rises without the share of solved tasks: the agent may be paid without solving."""
    rise = _rise(lines, "reward")
    if rise is None or rise[0] <= max(0.02, 2 * rise[1]):
        return None
    for key, name in (("dev_success", "the share of dev tasks solved"), ("success", "the share of tasks solved")):
        solved = _rise(lines, key)
        if solved is not None and solved[0] <= max(0.0, 0.1 * rise[0]):
            symptom = f"the reward rose by {rise[0]:.3f} and {name} by {solved[0]:+.3f}"
            cure = "read rollouts with a high reward that are not solved (loop view)"
            return Finding(symptom, cure, "it-does-not-learn")
    return None


RULES: tuple[Callable[[Lines], Finding | None], ...] = (
    no_signal,
    no_grade,
    broken_gap,
    cut_turns,
    failing_calls,
    hollow_reward,
)


def _rise(lines: Lines, key: str) -> tuple[float, float] | None:
    """Return the difference of the means of the last and of the first third, and its standard error."""
    values = _numbers(lines, key)
    if len(values) < FEWEST_FOR_A_TREND:
        return None
    third = len(values) // 3
    first, last = values[:third], values[-third:]
    error = sum(statistics.variance(part) / len(part) for part in (first, last)) ** 0.5
    return statistics.fmean(last) - statistics.fmean(first), error


def _numbers(lines: Lines, key: str) -> list[float]:
    """Return the numbers under a key; skip values of other types, which a foreign file may hold."""
    values = [line.get(key) for line in lines]
    return [float(value) for value in values if isinstance(value, int | float) and abs(value) < LARGEST]  # NaN is not


def _mean(lines: Lines, key: str) -> float | None:
    values = _numbers(lines, key)
    return statistics.fmean(values) if values else None


def findings(lines: Lines) -> list[Finding]:
    """Apply all rules to the lines of a run, from the first iteration on."""
    return [finding for rule in RULES if (finding := rule(lines)) is not None]


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = verb_parser("doctor", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a training run")
    options = parser.parse_args(arguments)
    try:
        lines = read_metrics(options.run)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    if not lines:
        say(f"no iteration of {options.run} has ended yet")
        return 0
    problems = findings(lines)
    groups = together(line.get("groups_by_solved", {}) for line in lines[-RECENT:])
    say(*map(str, problems), *(f"signal: {each}" for each in [signal_text(groups), *forecast(groups)] if groups))
    if not problems:
        names = ", ".join(rule.__name__.replace("_", " ") for rule in RULES)
        count = f"{len(lines)} iteration{'' if len(lines) == 1 else 's'}"
        say(f"nothing found in {count} of {options.run}; looked for: {names}")
    return 1 if problems else 0
