# The form of a reward function for TRL's GRPOTrainer: lists, and **kwargs.
from agent_environments.tools import reward

TASKS = [{"question": f"{n} + 1?", "ground_truth": str(n + 1)} for n in range(10)]


@reward
def reward_func(completions, ground_truth, **kwargs):
    return [1.0 if c == gt else 0.0 for c, gt in zip(completions, ground_truth)]
