"""Measure what the ways of thinking cost: AppWorld's prompt, 17 turns of a script, Qwen3's own vocabulary.

    python benchmarks/thinking_modes.py [--json PATH] [--turns 17]

The node's own episode loop plays a script in a world that answers every turn with the same text; no model and no engine
is needed. All three ways have each turn's code in common, and two of them its thinking, of a fixed number of words.
Printed of an episode: its sequences, the tokens of all of them together, those that a packed update computes in
micro-batches of 16,384, the tokens that are trained, those of them that are trained more than once, requests whose
prompt and sampled ids are not the beginning of a sequence (these two must be 0), and of six such episodes of one task,
which part after the prompt, the share of tokens that stand in a prefix which another sequence has too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

# The root and recipes/ too, because folders of tests/ are called like packages and hide those that are installed.
sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "recipes", "tests"))

from agent_environments.observation import observation
from agent_environments.protocol import Grade, Message, PoolStatus, StepResult
from appworld_adapter.prompt import Prompt, TaskCard, task_lines
from loop_formats.collection_request import CollectionRequest, Limits
from loop_formats.rollout import Rollout
from loop_recipes.engine.samples import Sample
from loop_recipes.engine.shared_prefixes import units
from model_families.chat.format import ChatFormat
from rollout_server.collecting.collector import EpisodeKey
from rollout_server.collecting.episode import Episode
from rollout_server.collecting.policy_sampler import EpisodeServices
from rollout_server.collecting.sampling_client import SamplingClient
from rollout_server.inference.router import Generation
from rollout_server.metrics import NodeMetrics
from support.chat_tokenizers import write_qwen3

CARD = TaskCard(
    task_id="1_1",
    instruction="How much money have I sent to my roommates on Venmo since the first of this month?",
    first_name="Ada",
    last_name="Byron",
    email="ada.byron@example.com",
    phone_number="5550100",
    date="2023-05-18T12:00:00",
)
CODE = "```python\nfor page in range(5):\n    print(apis.venmo.show_transactions(access_token=t, page_index=page))\n```"
OUTPUT = json.dumps({"transaction_id": 8216, "amount": 12.5, "created_at": "2023-05-02T10:11:12"}, indent=1)
THOUGHT_WORDS, OUTPUTS, GROUP, MICRO_BATCH = 200, 4, 6, 16_384


class Script:
    """A policy, a world and their pool in one: it says and answers the same in every turn."""

    dataset = "scripted"

    def __init__(self, tokens: ChatFormat):
        longest = max((message.content for message in Prompt("loop").messages(CARD)), key=len)
        text = " ".join(longest.split()[:THOUGHT_WORDS])
        thought = "" if tokens.thinking == "off" else f"<think>\n{text}\n</think>\n\n"
        self.ids = [*tokens._control.encode(thought + CODE), tokens.turn_end]
        self.answer = observation("\n".join([OUTPUT] * OUTPUTS), task_lines(CARD), 3000, tokens.spans)
        self.served: list[list[int]] = []

    async def generate(self, *, token_ids: list[int], **_: Any) -> Generation:
        self.served.append([*token_ids, *self.ids])
        return Generation(self.ids, [-0.5] * len(self.ids), "stop", "script", 0, 0.0)

    async def start(self, task_id: str) -> list[Message]:
        return Prompt("loop").messages(CARD)

    async def step(self, action: str) -> StepResult:
        assert action == CODE, "what is thought is not executed"
        return StepResult(self.answer, done=False)

    async def grade(self) -> Grade:
        return Grade(0.5, False)

    async def close(self) -> None:
        pass

    async def acquire(self, episode_id: str) -> Script:
        return self

    def status(self) -> PoolStatus:
        return PoolStatus()

    def release(self, what: object) -> None:
        pass


def play(tokens: ChatFormat, turns: int) -> tuple[list[Rollout], Script]:
    """Play the episode; returns its sequences, and the script that was followed."""
    script: Any = Script(tokens)
    services = EpisodeServices(script, tokens, script, script, NodeMetrics())
    limits = Limits(max_turns=turns, max_tokens_per_turn=4000, max_context=60_000)
    request = CollectionRequest("thinking", ["1_1"], 1, 0, limits=limits)
    policy_client = SamplingClient(request, "script", services)
    return asyncio.run(Episode(EpisodeKey("1_1", 0, 0), 0, request, script, policy_client).run()), script


def common_tokens(sequences: list[list[int]]) -> int:
    """Count the sequences' tokens in a prefix that a sequence before them has too."""
    common = 0
    for one, other in itertools.pairwise(sorted(sequences)):
        same = (n for n, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
        common += next(same, min(len(one), len(other)))
    return common


def figures(tokens: ChatFormat, turns: int) -> dict[str, float]:
    """Return the figures of one way."""
    rollouts, script = play(tokens, turns)
    trained = Counter(turn.message for rollout in rollouts for turn in rollout.turns)
    lost = [ids for ids in script.served if not any(one.token_ids[: len(ids)] == ids for one in rollouts)]
    prompt = rollouts[0].turns[0].start
    every = sum(len(rollout.token_ids) for rollout in rollouts)
    common = GROUP * common_tokens([rollout.token_ids for rollout in rollouts]) + (GROUP - 1) * prompt
    planned = units([Sample.from_rollout(rollout) for rollout in rollouts], MICRO_BATCH)
    return {
        "sequences": len(rollouts),
        "prompt_tokens": prompt,
        "tokens": every,
        "computed_tokens": sum(count for _, count in planned),
        "longest_sequence": max(len(rollout.token_ids) for rollout in rollouts),
        "trained_tokens": sum(sum(rollout.mask) for rollout in rollouts),
        "tokens_trained_twice": sum((times - 1) * len(script.ids) for times in trained.values()),
        "requests_not_in_a_sequence": len(lost),
        "share_in_common": round(common / (GROUP * every), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the rows there")
    parser.add_argument("--turns", type=int, default=17)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = write_qwen3(Path(name))
        for mode in ("off", "kept", "stripped"):
            measured = figures(ChatFormat(folder, mode), options.turns)
            print(f"{mode:9}", "  ".join(f"{metric} {value:,}" for metric, value in measured.items()), flush=True)
            rows += [
                {
                    "case": f"ours {mode}",
                    "metric": metric,
                    "value": value,
                    "unit": "tokens" if "tokens" in metric else "",
                }
                for metric, value in measured.items()
            ]
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
