"""The rollout node: vLLM servers, episodes, collections, and the queue that hands rollouts to training."""
