"""Environments an agent acts in: the protocol that the rollout node knows, and all environments but AppWorld."""
