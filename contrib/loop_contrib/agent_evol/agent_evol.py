"""Runs rounds of collecting, and of training on all solved rollouts (AgentEvol, arXiv 2406.04151).

    loop method evol tiny_cpu output_dir=runs/evol --training tiny_cpu --rounds 3
    loop method evol qwen2_5_32b output_dir=runs/evol seed=1 --training qwen2_5_32b --nproc-per-node 8 \\
        -- max_iterations=20

Each round samples with the newest policy (`loop method solved`), adds the solved rollouts to the set, and trains on the
whole set from the base policy (sft_appworld). Words before -- change the config of the collections, words after it the
config of the trainings. output_dir is the folder of all rounds. Each round's seed is 1 more than the last. The same
command continues after a stop, without the finished steps.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loop_contrib.rft.collect_solved import SOLVED
from loop_contrib.rft.solved import check_budget
from loop_formats.run_files import find_logs
from loop_formats.schema import ConfigError
from loop_recipes.config.arguments import config_parser
from loop_recipes.config.files import compose, config_name, split_words
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.config.sft_config import SftConfig
from loop_recipes.exit_status import exit_status
from loop_recipes.steps import StepFailed, Steps, module, newest_policy, on_ranks, tune

ROUND_KEYS = ("output_dir", "seed")
"""Keys whose values differ from round to round."""


@dataclass(frozen=True)
class AgentEvol:
    """The settings of a whole run. All but ``rounds`` must stay the same each time that a folder is continued.

    Args:
        config, collecting: the config of loop_appworld and the overrides of it, for the collections.
        training, learning: the config of sft_appworld and the overrides of it, for the trainings.
        seed: seed of the first round; each later round adds 1.
        attempts: most rollouts of one task in a round; an attempt that solves the task is the last.
        ranks: number of processes that train; 1 starts no process besides the program itself.
    """

    config: str
    training: str
    collecting: list[str]
    learning: list[str]
    attempts: int = 4
    temperature: float = 1.0
    ranks: int = 1
    seed: int = 0

    def check(self) -> None:
        """Check the settings of both commands now, so that a mistake does not show up after hours of sampling.

        Raises:
            ConfigError: one line that names the key and the cure.
        """
        check_budget([self.temperature], self.attempts, None)
        learning = [*self.learning, "output_dir=.", "rollouts.logs=[solved]"]
        read_config(compose(self.training, learning, "sft_appworld"), SftConfig)

    def collect(self, folder: Path, number: int, policy: Path | None) -> list[str]:
        """Return the command that samples round ``number`` (from 1) with ``policy``; None is the initial policy."""
        command = module("loop_contrib.rft.collect_solved", self.config, *self.collecting)
        command += [f"output_dir={folder}", f"seed={self.seed + number - 1}"]
        command += [] if policy is None else [f"initial_adapter={policy}"]
        return [*command, "--temperatures", f"{self.temperature:g}", "--attempts", str(self.attempts)]

    def train(self, folder: Path, logs: Sequence[Path]) -> list[str]:
        """Return the command that trains on ``logs``. A stopped training resumes where it ended."""
        ranks = on_ranks(self.ranks) if self.ranks > 1 else []
        command = tune("run", *ranks, "sft_appworld", "--config", self.training, *self.learning)
        names = ",".join(map(str, logs))
        return [*command, f"output_dir={folder}", f"rollouts.logs=[{names}]", "resume_from_checkpoint=True"]


def agent_evol(wanted: AgentEvol, out: Path, rounds: int) -> Path:
    """Run the rounds up to ``rounds`` that ``out`` still lacks. Return the folder of the newest policy.

    Raises:
        ConfigError: ``out`` was begun with another configuration.
        StepFailed: a command failed or was stopped before its end, or no rollout has solved a task yet.
    """
    steps = Steps(out, asdict(wanted))
    policy: Path | None = None
    logs: list[Path] = []
    for number in range(1, rounds + 1):
        folder = out / f"round_{number:02d}"
        solved, trained = folder / SOLVED, folder / "trained"
        steps.run(f"round {number}: collecting", wanted.collect(folder, number, policy), folder / "collect.log")
        logs += [solved] if find_logs(solved) else []
        if not logs:
            raise StepFailed(f"round {number}: no task is solved, so there is nothing to train on; try more --attempts")
        steps.run(f"round {number}: training", wanted.train(trained, logs), folder / "train.log", training=trained)
        policy = newest_policy(trained)
    assert policy is not None, "there is a round"
    return policy


def main(arguments: list[str] | None = None) -> int:
    """Run the command with these arguments and return its exit status."""
    words, learning = split_words(sys.argv[1:] if arguments is None else arguments)
    parser = config_parser("method evol", __doc__)
    parser.add_argument("--training", required=True, metavar="CONFIG", help="a config of sft_appworld: the learner")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (3)")
    parser.add_argument("--attempts", type=int, default=4, help="rollouts of a task in a round, at most (4)")
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature of the rollouts (1.0)")
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="processes of the trainings (1)")
    options = parser.parse_intermixed_args(words)
    for name in ("rounds", "attempts", "nproc_per_node"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")

    def work() -> str:
        conf = read_config(compose(options.config, options.overrides), LoopConfig)
        wanted = AgentEvol(
            config_name(options.config, "loop_appworld"),
            config_name(options.training, "sft_appworld"),
            [word for word in options.overrides if word.partition("=")[0] not in ROUND_KEYS],
            learning,
            options.attempts,
            options.temperature,
            options.nproc_per_node,
            conf.seed,
        )
        wanted.check()
        return f"newest policy: {agent_evol(wanted, Path(conf.output_dir).resolve(), options.rounds)}"

    return exit_status(parser.prog, work, (ConfigError, StepFailed, OSError))
