r"""Writes the reference solutions of AppWorld's tasks as rollouts to learn from: SFT-GT (LOOP, appendix C.1).

    loop method ground-truth worlds/synthetic --model recipes/loop_recipes/tiny_policy --prompt tiny \
        --out runs/tiny_cpu_ground_truth

Each task becomes one rollout in OUT/collections/ground-truth-<split>.jsonl, which `loop sft` and `loop view` read.
Nothing is executed: as in the paper, every observation is that of a turn that succeeds.
"""

from __future__ import annotations

from pathlib import Path

from agent_environments.observation import observation
from agent_environments.protocol import EnvironmentFault
from appworld_adapter.dataset import dataset_name, load_split
from appworld_adapter.ground_truth import EXECUTION_SUCCESSFUL, load_solution
from appworld_adapter.prompt import Prompt, TaskCard, task_lines
from loop_contrib.ground_truth.scripted import scripted_rollout
from loop_formats.run_files import COLLECTIONS, write_rollouts
from loop_recipes.config.arguments import verb_parser
from loop_recipes.exit_status import exit_status
from model_families.chat import open_chat


def main(arguments: list[str] | None = None) -> int:
    """Run the command with these arguments and return its exit status."""
    parser = verb_parser("method ground-truth", __doc__)
    parser.add_argument("world", type=Path, help="folder that holds data/")
    parser.add_argument("--model", type=Path, required=True, help="folder of the policy's tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--split", default="train", help="split of the tasks (train)")
    parser.add_argument("--prompt", default="loop", help="the prompt that the policy is served with (loop)")
    options = parser.parse_args(arguments)
    wanted = (options.world, options.split, options.model, options.prompt, options.out)
    errors = (ValueError, OSError, EnvironmentFault)
    return exit_status(parser.prog, lambda: f"written: {write_ground_truth(*wanted)}", errors)


def write_ground_truth(world: Path, split: str, model: Path, prompt: str, out: Path) -> Path:
    """Write one rollout for each task of ``split``. Return the path of the log.

    Raises:
        ValueError, OSError, EnvironmentFault: the world, split, tokenizer, prompt or a task's solution is missing.
    """
    tokens, template = open_chat(model), Prompt(prompt)
    collection = f"ground-truth-{split.replace(':', '-').replace(',', '')}"
    dataset, rollouts = dataset_name(world), []
    for task in load_split(world, split):
        card = TaskCard.load(world, task)
        success = observation(EXECUTION_SUCCESSFUL, task_lines(card), len(EXECUTION_SUCCESSFUL), tokens.spans)
        steps = [(turn.action, success) for turn in load_solution(world, task)]
        opening = template.messages(card)
        rollouts.append(
            scripted_rollout(
                tokens, opening, steps, collection=collection, task_id=task, dataset=dataset, server="ground truth"
            )
        )
    return write_rollouts(out / COLLECTIONS, collection, rollouts)
