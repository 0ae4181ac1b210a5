r"""Writes AppWorld's ground-truth solutions as rollouts to learn from: the set of SFT-GT (LOOP, appendix C.1).

    loop method ground-truth worlds/appworld --model models/Qwen2.5-32B-Instruct --out runs/qwen2_5_32b_ground_truth
    loop method ground-truth worlds/synthetic --model recipes/loop_recipes/tiny_policy --prompt tiny \
        --out runs/tiny_cpu_ground_truth

Each task becomes one rollout in OUT/collections/ground-truth-<split>.jsonl, which sft_appworld and `loop view` read.
Nothing is executed: every turn is answered with "Execution successful.", as in the paper.
"""

from __future__ import annotations

import sys
from pathlib import Path

from agent_environments.observation import observation
from agent_environments.protocol import EnvironmentFault
from appworld_adapter.dataset import dataset_name, load_split
from appworld_adapter.ground_truth import EXECUTION_SUCCESSFUL, SolutionTurn, load_solution
from appworld_adapter.prompt import Prompt, TaskCard, task_lines
from loop_formats.rollout import Rollout
from loop_formats.run_files import COLLECTIONS, write_rollouts
from loop_recipes.config.arguments import verb_parser
from loop_recipes.rollouts.scripted import scripted_rollout
from model_families.chat import open_chat
from model_families.chat.format import ChatFormat


def main(arguments: list[str] | None = None) -> int:
    """Do what the words ask for; returns the exit status."""
    parser = verb_parser("method ground-truth", __doc__)
    parser.add_argument("world", type=Path, help="folder that holds data/")
    parser.add_argument("--model", type=Path, required=True, help="folder of the policy's tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--split", default="train", help="the tasks (train)")
    parser.add_argument("--prompt", default="loop", help="the prompt that the policy is served with (loop)")
    options = parser.parse_args(arguments)
    try:
        file = write_ground_truth(options.world, options.split, options.model, options.prompt, options.out)
    except (ValueError, OSError, EnvironmentFault) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print(f"written: {file}")
    return 0


def write_ground_truth(world: Path, split: str, model: Path, prompt: str, out: Path) -> Path:
    """Write one rollout for each task of ``split``; returns the log.

    Raises:
        ValueError, OSError, EnvironmentFault: no such world, split, tokenizer or prompt, or no solution of a task.
    """
    tokens, template, dataset = open_chat(model), Prompt(prompt), dataset_name(world)
    collection = f"ground-truth-{split.replace(':', '-').replace(',', '')}"
    rollouts = [
        demonstration(TaskCard.load(world, task), load_solution(world, task), template, tokens, dataset, collection)
        for task in load_split(world, split)
    ]
    return write_rollouts(out / COLLECTIONS, collection, rollouts)


def demonstration(
    card: TaskCard, turns: list[SolutionTurn], template: Prompt, tokens: ChatFormat, dataset: str, collection: str
) -> Rollout:
    """A solution as the episode that a policy would be served."""
    shown = observation(EXECUTION_SUCCESSFUL, task_lines(card), len(EXECUTION_SUCCESSFUL), tokens.spans)
    return scripted_rollout(
        tokens,
        template.messages(card),
        [(turn.action, shown) for turn in turns],
        collection=collection,
        task_id=card.task_id,
        dataset=dataset,
        speaker="ground truth",
    )


if __name__ == "__main__":
    sys.exit(main())
