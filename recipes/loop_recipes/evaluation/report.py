"""The files and the table of a finished evaluation: report.json, report.md, results.jsonl, and a table in the terminal.

Every score is printed with its protocol: dataset, split, temperature, limits, model, adapter, package versions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from agent_environments.description import Description
from loop_formats.places import METRICS_FILE
from loop_formats.run_files import to_json, write_whole
from loop_recipes.config.loop_config import keys_to_keep
from loop_recipes.evaluation.comparison import Comparison, compare_with_first, comparison_tables
from loop_recipes.evaluation.groups import GroupScore, score_groups
from loop_recipes.evaluation.pass_at_k import PassAtK
from loop_recipes.evaluation.scores import Figure, NamedResults, Score, TaskResult, score, score_names
from loop_recipes.evaluation.tables import Document, Table, print_table, to_markdown

if TYPE_CHECKING:  # reading a report must not import torch
    from loop_recipes.evaluation.collect import Cell
    from loop_recipes.evaluation.config import EvalConfig, PolicyUnderTest

SCHEMA = 2
UNFINISHED = " An episode that the agent did not end itself counts as a failure."


@dataclass(frozen=True)
class ScoredCell:
    """A cell, its attempts, their score, and the score of each group of tasks."""

    cell: Cell
    results: list[TaskResult]
    score: Score
    groups: list[GroupScore]


@dataclass(frozen=True)
class Protocol:
    """Everything that all scores of one evaluation share; ``set_aside`` names earlier results that no score counts."""

    environment: Description
    dataset: str
    split: str
    tasks: list[str]
    difficulties: dict[str, int]
    model: str
    limits: dict[str, Any]
    seed: int
    level: float
    resamples: int
    packages: dict[str, str]
    groups: dict[str, list[str]] = field(default_factory=dict)
    environment_turns: dict[str, int] = field(default_factory=dict)
    set_aside: list[str] = field(default_factory=list)

    @property
    def bootstrap(self) -> dict[str, Any]:
        """Return the arguments of every bootstrap interval."""
        return {"level": self.level, "resamples": self.resamples}

    def lines(self) -> dict[str, str]:
        """Return name -> text, for the head of a document."""
        limits = self.limits
        own_turns = ", ".join(f"{name} {turns}" for name, turns in self.environment_turns.items())
        thinking = (
            f" after at most {limits['max_thinking_tokens']} of thinking" if "max_thinking_tokens" in limits else ""
        )
        compaction = f" (compaction: {limits['compaction']})" if "compaction" in limits else ""
        return {
            "dataset": self.dataset,
            "split": f"{self.split} ({len(self.tasks)} tasks)",
            "base model": self.model,
            "limits": f"{limits['max_turns']} turns{f' ({own_turns})' if own_turns else ''}, "
            f"{limits['max_tokens_per_turn']} tokens a turn{thinking}, "
            f"{limits['max_context']} tokens of context{compaction}, "
            f"{limits['episode_deadline_s']:g} s an episode",
            "seed": str(self.seed),
            "packages": ", ".join(f"{name} {number}" for name, number in self.packages.items()),
        }


def score_cells(cells: Sequence[tuple[Cell, list[TaskResult]]], protocol: Protocol) -> list[ScoredCell]:
    """Score every cell under the protocol's statistics."""
    return [
        ScoredCell(
            cell,
            results,
            score(results, protocol.difficulties, protocol.environment, **protocol.bootstrap),
            score_groups(results, protocol.groups, protocol.environment, **protocol.bootstrap),
        )
        for cell, results in cells
    ]


def compare_cells(scored: Sequence[ScoredCell], protocol: Protocol) -> list[Comparison]:
    """Compare the first policy with every other one, for each way of sampling."""
    named = [NamedResults(item.cell.policy.name, item.cell.sampling.label, item.results) for item in scored]
    return compare_with_first(named, protocol.groups, protocol.environment, **protocol.bootstrap)


def best_policy(scored: Sequence[ScoredCell]) -> str | None:
    """Return the name of the policy with the highest score under the first way of sampling; None without a score. The
    group score decides a tie, then the order.
    """
    first = [item for item in scored if item.cell.sampling == scored[0].cell.sampling]
    if not first:
        return None
    return max(first, key=lambda item: (item.score.success.mean, item.score.group_success.mean)).cell.policy.name


def write_report(
    folder: Path, config: EvalConfig, protocol: Protocol, scored: Sequence[ScoredCell], comparisons: list[Comparison]
) -> list[Path]:
    """Write results.jsonl, report.json and report.md; each appears whole or not at all. Returns their paths."""
    lines = []
    for item in scored:
        head = {"policy": item.cell.policy.name, "sampling": item.cell.sampling.label}
        lines += [to_json(head | result.to_dict()) for result in item.results]
    shared = asdict(protocol)
    del shared["environment"]  # in environment.json
    report = {
        "schema": SCHEMA,
        **shared,
        "policies": [
            {
                "name": policy.name,
                "adapter": str(policy.adapter) if policy.adapter else None,
                "sha256": policy.digest if policy.adapter else None,
                "chosen": policy.chosen or None,
                **({"remark": policy.remark} if policy.remark else {}),
                "endpoint": asdict(policy.endpoint) if policy.endpoint else None,
            }
            for policy in dict.fromkeys(item.cell.policy for item in scored)
        ],
        "scores": [
            {
                "policy": item.cell.policy.name,
                "sampling": {**asdict(item.cell.sampling), "label": item.cell.sampling.label},
                "fingerprint": dict(item.cell.fingerprint),
                **asdict(item.score),
                "groups": [asdict(group) for group in item.groups],
            }
            for item in scored
        ],
        "comparisons": [asdict(comparison) for comparison in comparisons],
        "best": best_policy(scored),
        "config": keys_to_keep(config),
    }
    return [
        write_whole(folder / "results.jsonl", "".join(f"{line}\n" for line in lines)),
        write_whole(folder / "report.json", to_json(report, indent=1) + "\n"),
        write_whole(folder / "report.md", to_markdown(_document(protocol, scored, comparisons))),
    ]


def _document(protocol: Protocol, scored: Sequence[ScoredCell], comparisons: Sequence[Comparison]) -> Document:
    """Return the report: protocol, scores, differences, behaviour, and lost rollouts."""
    percent, environment = f"{protocol.level:.0%}", protocol.environment
    unfinished = "" if environment.unfinished_solves else UNFINISHED
    policies = dict.fromkeys(item.cell.policy for item in scored)
    head = [f"- {name}: {text}" for name, text in protocol.lines().items()]
    head += [f"- policy {policy.name}: {_describe(policy)}" for policy in policies]
    head += [f"- in no figure: {line}" for line in protocol.set_aside]
    document: list[str | Table] = [
        f"# Evaluation on {protocol.dataset}, {protocol.split}",
        "\n".join(head),
        f"{_scores(environment)} in percent: mean over tasks ± standard deviation over whole runs, "
        f"[{percent} bootstrap interval over {environment.groups}].{unfinished} "
        f"{_score_words(environment)}.",
        _score_table(scored, environment),
    ]
    if protocol.groups:
        document += ["## By environment and group", "Success in percent and reward, each with its interval."]
        document.append(_group_table(scored))
    if (passes := _pass_table(scored)).rows:
        explained = (
            "pass@k: any of k attempts solves the task; pass^k: all of them do. A task with fewer than k attempts "
        )
        explained += "counts with those that it has."
        document += ["## Several attempts at a task", f"{explained} In percent, each with its interval.", passes]
    best = best_policy(scored)
    if best is not None and len({policy.name for policy in policies}) > 1:
        document.append(f"Best policy ({scored[0].cell.sampling.label}): **{best}**.")
    if comparisons:
        document += [
            "## Differences",
            f"In percentage points, paired by task; [{percent} bootstrap interval] and "
            f"the p-value of a permutation test, both over {environment.groups}.",
            *comparison_tables(comparisons, environment),
        ]
    if (behavior := _behavior_table(scored, environment)).rows:
        sources = ", ".join(dict.fromkeys(figure.source for figure in environment.figures if figure.source))
        document += [f"## Behaviour ({sources})" if sources else "## Behaviour", behavior]
    if lost := lost_rollouts(scored, environment):
        document += ["## Lost rollouts", "They are in no figure: the agent had no part in their failure."]
        document.append("\n".join(f"- {line}" for line in lost))
    return document


def lost_rollouts(scored: Sequence[ScoredCell], environment: Description) -> list[str]:
    """Return lines: for each score the number of lost rollouts and how far they could move the score, then every lost
    rollout with the reason."""
    lines = []
    for item in scored:
        result, bounds = item.score, item.score.bounds
        if bounds is None:
            continue
        means = [
            (name, getattr(result, key).mean, getattr(bounds, key), ".1f")
            for key, name in score_names(environment).items()
        ]
        ranges = ", ".join(
            f"{name} {mean:{form}} would be {low:{form}} to {high:{form}}"
            for name, mean, (low, high), form in [*means, ("reward", result.reward, bounds.reward, ".3f")]
        )
        without = result.tasks - len({each.task_id for each in item.results if not each.lost})
        tasks = f", and with them all of {without} of {result.tasks} tasks" if without else ""
        lines.append(
            f"{item.cell.label}: {len(result.lost)} of {result.tasks * result.runs} rollouts lost{tasks}; had they all "
            f"failed or all succeeded, {ranges}"
        )
        lines += [f"lost: {item.cell.label}: {task}, run {run}: {reason}" for task, run, reason in result.lost]
    return lines


def terminal_table(protocol: Protocol, scored: Sequence[ScoredCell], console: Console) -> None:
    """Print the tables of scores, and the lost rollouts."""
    environment = protocol.environment
    title = f"{protocol.dataset}, {protocol.split}: {_scores(environment)} in %"
    print_table(console, title, _score_table(scored, environment))
    words = f"{_score_words(environment)}; [low, high]: {protocol.level:.0%} interval over {environment.groups}; "
    words += "over budget: episodes that a limit ended; lost: episodes in no figure, which failed without the agent"
    console.print(words, markup=False, highlight=False)
    if protocol.groups:
        print_table(console, "Success in % and reward, by environment and group", _group_table(scored))
    if (passes := _pass_table(scored)).rows:
        print_table(console, "pass@k: any of k attempts solves the task; pass^k: all do. In %", passes)
    for line in lost_rollouts(scored, environment):
        console.print(line, markup=False)  # a task id may hold brackets


def _describe(policy: PolicyUnderTest) -> str:
    if policy.endpoint is not None:
        return f"{policy.endpoint.model} at {policy.endpoint.url}, whose weights and prompt format are its own"
    if policy.adapter is None:
        return "the base model"
    details = [f"sha256 {policy.digest[:12]}", policy.chosen, policy.remark]
    return f"adapter {policy.adapter} ({'; '.join(filter(None, details))})"


def _scores(environment: Description) -> str:
    return " and ".join(score_names(environment).values())


def _score_words(environment: Description) -> str:
    """Explain each score: which share of which tasks or groups it is."""
    of = {"success": "tasks that are solved", "group_success": f"{environment.groups} all of whose tasks are solved"}
    return "; ".join(f"{name}: {of[key]}" for key, name in score_names(environment).items())


def _score_table(scored: Sequence[ScoredCell], environment: Description) -> Table:
    names = score_names(environment)
    difficulties = sorted({difficulty for item in scored for difficulty in item.score.by_difficulty})
    levels = [f"{'/'.join(names.values())} diff. {difficulty}" for difficulty in difficulties]

    def cells(item: ScoredCell) -> list[str]:
        result = item.score
        scores = [result.by_difficulty.get(difficulty) for difficulty in difficulties]
        return [
            *_named(item),
            str(result.runs),
            *(_figure(getattr(result, key)) for key in names),
            *("-" if level is None else "/".join(f"{getattr(level, key):.1f}" for key in names) for level in scores),
            f"{result.reward:.3f}",
            f"{result.interactions:.1f}",
            f"{len(result.over_budget)}/{result.tasks * result.runs - len(result.lost)}",
            str(len(result.lost)),
        ]

    columns = ["policy", "sampling", "runs", *names.values(), *levels, "reward", "turns", "over budget", "lost"]
    return Table(columns, [cells(item) for item in scored], named=2)


def _pass_table(scored: Sequence[ScoredCell]) -> Table:
    """Return a table with a row for each k of each score that has several runs."""
    rows = [
        [*_named(item), str(one.k), _counted(one), one.any.text(".1f"), one.all.text(".1f")]
        for item in scored
        for one in item.score.passes
    ]
    return Table(["policy", "sampling", "k", "tasks", "pass@k", "pass^k"], rows, named=3)


def _counted(one: PassAtK) -> str:
    fewer = one.tasks - one.whole
    return f"{one.tasks} ({fewer} with fewer)" if fewer else str(one.tasks)


def _group_table(scored: Sequence[ScoredCell]) -> Table:
    rows = [
        [*_named(item), group.group, str(group.tasks), group.success.text(".1f"), group.reward.text(".3f")]
        for item in scored
        for group in item.groups
    ]
    return Table(["policy", "sampling", "group", "tasks", "success", "reward"], rows, named=3)


def _behavior_table(scored: Sequence[ScoredCell], environment: Description) -> Table:
    """Return a table of the environment's figures that any rollout has, a column for each score."""
    rows = []
    for figure in environment.figures:
        values = [(item.score.behavior or {}).get(figure.name) for item in scored]
        if any(value is not None for value in values):
            rows.append([figure.title, *("-" if value is None else f"{value:.3g}" for value in values)])
    return Table(["behaviour", *(item.cell.label for item in scored)], rows)


def _named(item: ScoredCell) -> list[str]:
    return [item.cell.policy.name, item.cell.sampling.label]


def _figure(figure: Figure) -> str:
    spread = "" if figure.std is None else f" ± {figure.std:.1f}"
    return f"{figure.mean:.1f}{spread} [{figure.interval.low:.1f}, {figure.interval.high:.1f}]"


def read_report(folder: Path) -> tuple[Mapping[str, Any], list[NamedResults]]:
    """Read an evaluation's report.json, and its results in the order of its scores.

    Raises:
        ValueError: the folder holds no evaluation, or one of another schema.
    """
    try:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError) as error:
        near = [
            *sorted(folder.glob("*/report.json")),
            *sorted(Path("runs", folder).glob("*/report.json")),
            *(above / "report.json" for above in folder.absolute().parents),
        ]
        begun = any((folder / name).exists() for name in ("node", "journal.jsonl"))
        why = "give the folder of an evaluation" if folder.exists() else "nothing is there"
        why = "it has not ended, and the same `loop eval` goes on with it" if begun else why
        if (folder / METRICS_FILE).is_file():
            why = "it is a training run, which `loop eval` has not scored"
        why = next((f"did you mean {path.parent}?" for path in near if path.is_file()), why)
        raise ValueError(f"{folder} holds no evaluation with a {Path(error.filename).name}: {why}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: report.json and results.jsonl cannot be read; {error}") from error
    schema = report.get("schema") if isinstance(report, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{folder}: report schema {schema!r} is not {SCHEMA}")
    grouped: dict[tuple[str, str], list[TaskResult]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            data = json.loads(line)
            grouped.setdefault((data["policy"], data["sampling"]), []).append(TaskResult.from_dict(data))
        except (ValueError, KeyError, TypeError) as error:
            file = folder / "results.jsonl"
            raise ValueError(f"{file}:{number} is not a result; evaluate again, which repeats no rollout") from error
    return report, [NamedResults(name, sampling, results) for (name, sampling), results in grouped.items()]
