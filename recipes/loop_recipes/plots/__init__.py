"""Figures of a run: learning curves, and the agent's behaviour in its rollouts."""
