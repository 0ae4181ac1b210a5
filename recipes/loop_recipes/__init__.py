"""The library behind the recipes that train and evaluate agents with LOOP.

The recipes themselves are the files beside this package; `docs/development.md` gives the reading order of one
iteration. The wings, each using only those below it:

    launch                              loop-launch: checks a job, starts its rollout node
    viewer, plots                       what a run left behind, for people
    collecting, evaluation, warm_start  rollouts for training, scores, the tiny policy from nothing
    learner                             advantages, batches, log-probs, losses, steps, adapters, checkpoints
    config                              schemas and files of configs, and what can be refused before work begins
"""

import agent_environments  # noqa: F401 - before torch, for the variable that it sets
