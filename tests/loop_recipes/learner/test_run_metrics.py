"""METRICS against what a run writes, both ways: no key without a sentence, no sentence for a key that nobody writes."""

import json

from omegaconf import OmegaConf

from loop_recipes.learner.run_metrics import CONDITIONAL_KEYS, METRICS
from support.small_runs import replay_config, train

CALL = '<tool_call>{"name": "a"}</tool_call>'
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
    log = tmp_path / "logs/made-up-i0001.jsonl"
    rollouts = [json.loads(line) | {"messages": MESSAGES} for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(rollout) + "\n" for rollout in rollouts))
    cfg = OmegaConf.load(config)
    cfg.loss.kl_coefficient = 0.1
    train(cfg)
    (line,) = [json.loads(text) for text in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    written = set(line) | {"value_loss", "dev_iteration", "dev_reward", "dev_success"}  # of tests of their own
    assert written == set(METRICS)
    assert set(METRICS) - CONDITIONAL_KEYS <= set(line)
    assert line["behavior_turns"] > 0
    assert line["tool_calls"] > 0
