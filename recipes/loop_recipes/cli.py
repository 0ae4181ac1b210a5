"""The command ``loop``: a verb for each thing that is done with configs, nodes and runs.

Only the module of the verb asked for is imported: the help, and a mistake in a command line, need no torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from loop_plumbing.visible import show_all_text

VERBS = {
    "init": ("NAME", "begin a task of your own: a file of functions", "loop_recipes.launch.init_cli:main"),
    "try": ("FILE.py", "play a few tasks of such a file", "loop_recipes.launch.try_cli:main"),
    "train": ("CONFIG|FILE.py", "train an agent", "loop_recipes.launch.recipe_cli:train"),
    "sft": ("CONFIG", "train on stored rollouts", "loop_recipes.launch.recipe_cli:sft"),
    "eval": ("CONFIG", "score policies on held-out tasks", "loop_recipes.launch.recipe_cli:evaluate"),
    "check": ("CONFIG", "show what would run where, and whether it fits", "loop_recipes.launch.check_cli:main"),
    "node": ("CONFIG", "run a rollout node; or status URL, cancel URL ID", "loop_recipes.launch.node_cli:main"),
    "serve": ("ENVIRONMENT", "offer an environment to other programs", "agent_environments.services.cli:main"),
    "view": ("RUN", "look at rollouts in a browser", "loop_recipes.viewer.cli:main"),
    "plot": ("RUN...", "draw learning curves", "loop_recipes.plots.curves:main"),
    "compare": ("A B", "compare two evaluations, task by task", "loop_recipes.evaluation.compare_cli:main"),
    "method solved": (
        "CONFIG",
        "sample until each task is solved (RFT)",
        "loop_recipes.methods.rft.collect_solved:main",
    ),
    "method trees": ("CONFIG", "search trees of turns (DPO-MCTS)", "loop_recipes.methods.dpo_mcts.search_trees:main"),
    "method rank-turns": (
        "CONFIG",
        "rank turns by a critic (SWEET-RL)",
        "loop_recipes.methods.sweet_rl.rank_turns:main",
    ),
    "method evol": ("CONFIG", "collect and train in rounds (AgentEvol)", "loop_recipes.methods.agent_evol:main"),
    "method ground-truth": ("WORLD", "write reference solutions (SFT-GT)", "loop_recipes.methods.ground_truth:main"),
    "method turn-values": (
        "RUN",
        "value turns by Monte Carlo",
        "loop_recipes.methods.turn_credit.turn_values_cli:main",
    ),
}
"""Verb -> its main argument, a summary, and the function that is called with the words after the verb."""

NOTES = """\
CONFIG is a YAML file, or a name from `tune ls` with or without its folder. After it
come key=value, or ~key to leave one out. `loop VERB --help` lists a verb's options."""


def main(arguments: Sequence[str] | None = None) -> int | None:
    """Call the verb's function; returns the exit status, None for 0."""
    show_all_text()
    words = list(sys.argv[1:] if arguments is None else arguments)
    length = 2 if words[:1] == ["method"] else 1
    verb = " ".join(words[:length])
    if verb in VERBS:
        module, function = VERBS[verb][2].split(":")
        try:
            return getattr(importlib.import_module(module), function)(words[length:])
        except KeyboardInterrupt:
            print(f"loop {verb}: stopped", file=sys.stderr)
            return 130
    if len(words) < length or words[length - 1] in ("-h", "--help"):
        print(help_text())
        return 0
    sys.exit(f"loop: no verb {verb!r}; there are: {', '.join(VERBS)}")


def help_text() -> str:
    """The verbs, on one screen."""
    lines = [f"  {f'{verb} {argument}':<27}{summary}" for verb, (argument, summary, _) in VERBS.items()]
    return "\n".join(["usage: loop VERB ...", "", *lines, "", NOTES])


if __name__ == "__main__":
    sys.exit(main())
