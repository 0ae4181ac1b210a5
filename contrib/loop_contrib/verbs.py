"""The verbs of ``loop`` that papers' methods and services add."""

VERBS = {
    "serve": ("ENVIRONMENT", "serve an environment to other programs", "loop_contrib.services.cli:main"),
    "method solved": ("CONFIG", "sample until each task is solved (RFT)", "loop_contrib.rft.collect_solved:main"),
    "method trees": ("CONFIG", "search trees of turns (DPO-MCTS)", "loop_contrib.dpo_mcts.search_trees:main"),
    "method rank-turns": ("CONFIG", "rank turns by a critic (SWEET-RL)", "loop_contrib.sweet_rl.rank_turns:main"),
    "method evol": ("CONFIG", "collect and train in rounds (AgentEvol)", "loop_contrib.agent_evol.agent_evol:main"),
    "method ground-truth": (
        "WORLD",
        "write reference solutions (SFT-GT)",
        "loop_contrib.ground_truth.ground_truth:main",
    ),
    "method turn-values": ("RUN", "value turns by Monte Carlo", "loop_contrib.turn_credit.turn_values_cli:main"),
}
"""Verbs in the form of ``loop_recipes.cli.VERBS``."""
