"""Measure what one process costs on the way from rollout nodes to the trainer, and add it up for more nodes.

    python benchmarks/scale.py [--tokens 16000] [--json results.json]

Measured here, each with the class that runs in production:

- ``record``: bytes of a rollout of --tokens tokens in the log, tokens a second written (JSON, log, fsync) by a rollout
  node and read (JSON, checks) by the trainer's rank 0, which reads the rollouts of all nodes by itself;
- ``collector``: starts and ends of episodes a second, with 40, 320 and 1280 tasks x 6 in one collection, and the power
  of the tasks by which the time of all of them grows.

From these, an iteration of 240 rollouts for each rollout node at 2, 8 and 64 nodes, half of them rollout nodes:
``queue_bytes`` (all rollouts), ``read_seconds`` (rank 0), ``adapter_bytes`` (one version of Qwen2.5-32B's adapter, rank
16, bf16, to every rollout node). Made-up token ids; times are CPU seconds of this process.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from pathlib import Path

from loop_formats.collection_request import CollectionRequest
from loop_formats.rollout import Rollout, Turn
from rollout_server.collecting.collector import Collector
from rollout_server.collecting.rollout_log import AppendLog

VOCABULARY = 151_936
ROLLOUTS_PER_NODE = 240
ADAPTER_BYTES = 134_217_728 * 2
CLUSTERS = (2, 8, 64)
COLLECTIONS = (40, 320, 1280)


def made_up_rollout(tokens: int, turns: int = 40, sampled_share: float = 0.2) -> Rollout:
    """Make an episode of ``tokens`` tokens whose turns take ``sampled_share`` of them, with four characters a token."""
    draw = random.Random(0)
    each = tokens // (turns + 1)
    spans = [(each * (number + 1), each * (number + 1) + int(each * sampled_share)) for number in range(turns)]
    mask, logprobs = [False] * tokens, [0.0] * tokens
    for start, end in spans:
        mask[start:end] = [True] * (end - start)
        logprobs[start:end] = [-draw.expovariate(2.0) for _ in range(end - start)]
    return Rollout(
        rollout_id="scale-i0001/task_1/0.0",
        collection_id="scale-i0001",
        task_id="task_1",
        index=0,
        attempt=0,
        seed=0,
        dataset="made-up",
        token_ids=[draw.randrange(VOCABULARY) for _ in range(tokens)],
        mask=mask,
        sampler_logprobs=logprobs,
        turns=[Turn(start, end, 1, "stop", "server0", 1.0, 0.1, 2 * n + 1) for n, (start, end) in enumerate(spans)],
        messages=[{"role": role, "content": "word" * (each // 2)} for role in ("user", "assistant") * turns],
        reward=0.5,
        success=False,
        requirements=[],
        end_reason="completed",
        temperature=1.0,
        started_at=0.0,
        seconds=60.0,
    ).validate()


def measure_record(tokens: int, count: int) -> dict[str, float]:
    rollout = made_up_rollout(tokens)
    with tempfile.TemporaryDirectory() as folder:
        log = AppendLog(Path(folder) / "log.jsonl", lambda record: True)
        started = time.process_time()
        for _ in range(count):
            log.append([rollout.to_json()])
        writing = time.process_time() - started
        lines = log.path.read_text().splitlines()
    started = time.process_time()
    for line in lines:
        Rollout.from_dict(json.loads(line)).validate()
    reading = time.process_time() - started
    return {
        "bytes_per_token": len(lines[0]) / tokens,
        "written_tokens_per_second": count * tokens / writing,
        "read_tokens_per_second": count * tokens / reading,
    }


def measure_collector(tasks: int) -> float:
    """Return the starts and ends a second, with as many episodes running as there are tasks."""
    request = CollectionRequest("scale", [f"task_{number}" for number in range(tasks)], 6, 0)
    collector = Collector(request)
    started = time.process_time()
    running = [key for _ in range(tasks) if (key := collector.start_next()) is not None]
    events = len(running)
    while running:
        collector.finished(running.pop(0))
        events += 1
        if (key := collector.start_next()) is not None:
            running.append(key)
            events += 1
    assert collector.outcome == "complete"
    return events / (time.process_time() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_000, help="tokens of a rollout")
    parser.add_argument("--rollouts", type=int, default=50, help="rollouts to write and read")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []

    def add(case: str, metric: str, value: float, unit: str) -> None:
        rows.append({"case": f"ours {case}", "metric": metric, "value": value, "unit": unit})
        print(f"{case:28}{metric:28}{value:18,.2f} {unit}")

    record = measure_record(options.tokens, options.rollouts)
    for metric, value in record.items():
        add(f"record_{options.tokens}_tokens", metric, value, "B" if metric == "bytes_per_token" else "tokens/s")
    rates = {tasks: max(measure_collector(tasks) for _ in range(3)) for tasks in COLLECTIONS}
    for tasks, rate in rates.items():
        add(f"collector_{tasks}_tasks", "events_per_second", rate, "1/s")
    few, most = min(rates), max(rates)
    exponent = 1 + math.log(rates[few] / rates[most]) / math.log(most / few)
    add(f"collector_{few}_to_{most}_tasks", "time_exponent", exponent, "")
    for nodes in CLUSTERS:
        rollout_nodes = nodes // 2
        tokens = rollout_nodes * ROLLOUTS_PER_NODE * options.tokens
        case = f"cluster_{nodes}_nodes"
        add(case, "queue_bytes", tokens * record["bytes_per_token"], "B")
        add(case, "read_seconds", tokens / record["read_tokens_per_second"], "s")
        add(case, "adapter_bytes", rollout_nodes * ADAPTER_BYTES, "B")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
