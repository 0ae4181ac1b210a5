"""METRICS against what a run writes, both ways: no key without a sentence, no sentence for a key that nobody writes."""

import json
from dataclasses import replace

import numpy as np
import pytest
from omegaconf import OmegaConf

from agent_environments.description import DEFAULT_DESCRIPTION, OWN_BEHAVIOR
from agent_environments.tools.behavior import ToolBehavior
from loop_formats.rollout import by_episode
from loop_formats.run_files import read_rollouts
from loop_formats.run_folder import write_description
from loop_recipes.algorithm.losses import PolicyLoss
from loop_recipes.evaluation.scores import TaskResult
from loop_recipes.run.metrics import METRICS, behavior_metrics, rollout_metrics
from loop_recipes.run.tracker import points
from loop_viewer.run_data import RunData
from support import rollouts as records
from support.small_runs import in_sequences, replay_config, train, write_logs

BOTH = replace(DEFAULT_DESCRIPTION, behavior=OWN_BEHAVIOR)
"""What is said of an environment with code and with tools."""
CALL = '<tool_call>{"name": "a"}</tool_call>'
STREAM_KEYS = frozenset(key for key, text in METRICS.items() if text.endswith("only of a stream"))
CONDITIONAL_KEYS = frozenset(
    key for key, text in METRICS.items() if "; only " in text or key.startswith(("dev_", "earlier_dev_"))
)
"""Keys that some runs alone write, as their sentences say. All others are in every line of an iteration that took a
step."""

MESSAGES = [
    {"role": "system", "content": CALL},
    {"role": "user", "content": "task"},
    *[
        {"role": role, "content": content}
        for _ in range(3)
        for role, content in (
            ("assistant", f"```python\napis.a.b()\n```\n{CALL}"),
            ("user", "Execution failed. Traceback:\nx"),
        )
    ],
]


def test_metrics_holds_what_a_run_writes_and_nothing_else(tmp_path):
    config = replay_config(tmp_path, iterations=1, device_peak_tflops=1.0)
    write_description(tmp_path / "logs", BOTH)
    log = tmp_path / "logs/made-up-i0001.jsonl"
    rollouts = [json.loads(line) for line in log.read_text().splitlines()]
    for rollout in rollouts:
        rollout["messages"] = MESSAGES
        own = {"thinking_tokens": 1}
        rollout["turns"] = [turn | own | {"message": 2 + 2 * number} for number, turn in enumerate(rollout["turns"])]
        if rollout["index"] == 1:
            rollout["extra"] = {"stated": {"rewards": {"form": 0.25}, "metrics": {"steps": 3.0}}}
        if rollout["index"] == 2:
            rollout["extra"] = {"stated": {"metrics": {"steps": 5.0}}}
        calls = {0: {"answered": 4}, 3: {"answered": 2, "edited.arguments": 1}}
        if rollout["index"] in calls:
            rollout["extra"] = {"harness": {"calls": calls[rollout["index"]]}}
        rollout["task_id"] = f"{'sums' if rollout['index'] else 'craft'}/{rollout['task_id']}"
    log.write_text("".join(json.dumps(rollout) + "\n" for rollout in rollouts))
    cfg = OmegaConf.load(config)
    cfg.loss.kl_coefficient = 0.1
    cfg.loss.sampler_correction = {"_component_": "loop_recipes.algorithm.sampler_correction.TruncatedWeights"}
    train(cfg)
    (line,) = [json.loads(text) for text in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    elsewhere = {key for key in METRICS if key.startswith(("dev_", "earlier_dev_"))} | STREAM_KEYS
    written = (
        set(line)
        | elsewhere
        | {"left_out_rollouts", "broken_figures", "held_out_loss", "gap_base", "gap_ok", "gap_broken"}
    )  # which tests of their own look at
    assert written == {*METRICS, *PolicyLoss.figures, *(figure.key for figure in BOTH.figures)}
    assert set(METRICS) - CONDITIONAL_KEYS <= set(line)
    assert 0 < line["correction_weight"] <= 2
    assert line["behavior_turns"] > 0
    assert line["tool_calls"] > 0
    assert line["stated"] == {"rewards": {"form": 0.25}, "metrics": {"steps": 4.0}}
    assert line["endpoint"] == {"answered": 3.0, "edited.arguments": 0.5}
    assert points([line])[0].numbers["endpoint/answered"] == 3.0
    parts = line["environments"]
    assert {name: part["rollouts"] for name, part in parts.items()} == {"craft": 3, "sums": 9}
    assert sum(part["rollouts"] * part["reward"] for part in parts.values()) / 12 == pytest.approx(line["reward"])


def test_a_figure_that_breaks_ends_no_run_and_does_not_vanish(tmp_path, monkeypatch, caplog):
    log = write_logs(tmp_path, 1, 300) / "made-up-i0001.jsonl"
    rollouts = [
        replace(
            rollout,
            messages=MESSAGES,
            turns=[replace(turn, message=2 + 2 * number) for number, turn in enumerate(rollout.turns)],
        )
        for rollout in read_rollouts(log)
    ]
    whole = behavior_metrics(rollouts, BOTH)
    monkeypatch.setattr(ToolBehavior, "counts", lambda self, turns: {}["no such"])
    metrics = behavior_metrics(rollouts, BOTH)
    left_out = set(whole) - set(metrics)
    assert metrics == {**{name: value for name, value in whole.items() if name not in left_out}, "broken_figures": 1}
    assert left_out <= {figure.key for figure in ToolBehavior.figures}
    assert left_out
    assert "the figures of tool calls could not be computed: KeyError: 'no such' (" in caplog.text


def test_errors_are_over_tasks_and_turns_are_counted_by_what_ended_them():
    rewards = {"a_1": [0.0, 0.5], "b_1": [0.25, 0.25], "c_1": [1.0, 1.0]}
    ends = [replace(records.turn(1, 2), finish_reason=reason) for reason in ("stop", "length", "length", "cut")]
    rollouts = [
        records.rollout([1] * 3, ends, task_id=task, index=index, reward=reward, success=reward == 1.0)
        for task, values in rewards.items()
        for index, reward in enumerate(values)
    ]
    metrics = rollout_metrics(rollouts)
    assert metrics["reward_error"] == pytest.approx(np.std([0.25, 0.25, 1.0], ddof=1) / 3**0.5)
    assert metrics["success_error"] == pytest.approx(1 / 3)
    assert (metrics["cut_turns"], metrics["stopped_turns"], metrics["failed_turns"]) == (0.5, 0.25, 0.0)
    assert "reward_error" not in rollout_metrics(rollouts[:2]), "one task"


def test_an_episode_of_several_sequences_counts_once_wherever_rollouts_are_counted(tmp_path):
    """The same episodes, each turn in a sequence of its own: nothing but the number of tokens read is different."""
    log = write_logs(tmp_path, 1, 300) / "made-up-i0001.jsonl"

    by_harness = [{"role": "assistant", "content": f"dummy {CALL}"}, {"role": "user", "content": "said for it"}]

    def told(rollout):
        """After each turn the harness writes one in the agent's name; a later sequence shows the turns before."""
        before = rollout.segment
        count = before + len(rollout.turns)
        messages = MESSAGES[:2] + [text for _ in range(count) for text in (*MESSAGES[2:4], *by_harness)]
        turns = [replace(turn, message=2 + 4 * (before + place)) for place, turn in enumerate(rollout.turns)]
        return replace(rollout, messages=messages, turns=turns)

    whole = [told(rollout) for rollout in read_rollouts(log)]
    split = [told(part) for rollout in whole for part in in_sequences(rollout)]
    readings = []
    for rollouts in (whole, split):
        log.write_text("".join(f"{rollout.to_json()}\n" for rollout in rollouts))
        metrics = {**rollout_metrics(rollouts), **behavior_metrics(rollouts, BOTH)}
        for name in ("tokens", "tokens_max", "sequences"):
            metrics.pop(name)
        assert (metrics["behavior_dummy"], metrics["tool_calls"]) == (0, metrics["turns"])
        results = [TaskResult.from_rollout(*sequences) for sequences in by_episode(rollouts)]
        viewer = RunData(log)
        advantages = {(e["task"], e["index"]): e["advantage"] for e in viewer.summaries("made-up-i0001")}
        readings.append(
            {
                "metrics": {name: round(value, 9) for name, value in metrics.items()},
                "scores": [(r.task_id, r.run, r.reward, r.turns, r.sampled_tokens) for r in results],
                "viewer": (viewer.overview()["collections"][0]["totals"], advantages),
            }
        )
    assert readings[0] == readings[1]
