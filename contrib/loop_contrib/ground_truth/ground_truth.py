r"""Writes the reference solutions of an environment's tasks as rollouts to learn from: SFT-GT (LOOP, appendix C.1).

    loop method ground-truth worlds/synthetic --model recipes/loop_recipes/tiny_policy --prompt tiny \
        --out runs/tiny_cpu_ground_truth

Each task becomes one rollout in OUT/collections/ground-truth-<split>.jsonl, which `loop sft` and `loop view` read.
Nothing is executed: as in the paper, every turn gets the environment's fixed answer to a solution's turn.
"""

from __future__ import annotations

from pathlib import Path

from agent_environments.protocol import EnvironmentFault, PoolWithSolutions, pool_class
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
    parser.add_argument("--environment", default="appworld", metavar="NAME", help="environment of the tasks (appworld)")
    options = parser.parse_args(arguments)
    wanted = (options.environment, options.world, options.split, options.model, options.prompt, options.out)
    errors = (ValueError, OSError, EnvironmentFault)
    return exit_status(parser.prog, lambda: f"written: {write_ground_truth(*wanted)}", errors)


def write_ground_truth(environment: str, world: Path, split: str, model: Path, prompt: str, out: Path) -> Path:
    """Write one rollout for each task of ``split``. Return the path of the log.

    Raises:
        ValueError, OSError, EnvironmentFault: the world, split, tokenizer, prompt or a task's solution is missing.
    """
    tokens = open_chat(model)
    pool = pool_class(environment)
    if not isinstance(pool, PoolWithSolutions):
        raise ValueError(f"environment {environment!r} has no reference solutions")
    dataset, solutions = pool.solutions(world, split, prompt, tokens.spans)
    collection = f"ground-truth-{split.replace(':', '-').replace(',', '')}"
    rollouts = [
        scripted_rollout(
            tokens,
            solution.opening,
            solution.steps,
            collection=collection,
            task_id=solution.task_id,
            dataset=dataset,
            server="ground truth",
        )
        for solution in solutions
    ]
    return write_rollouts(out / COLLECTIONS, collection, rollouts)
