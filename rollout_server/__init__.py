"""The rollout node: vLLM servers, episodes, collections with their logs, and the policies they are sampled from."""
