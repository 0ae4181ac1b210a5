"""Figures of a run: learning curves, and what its rollouts say of the agent's behaviour."""
