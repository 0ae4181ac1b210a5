"""Environments an agent acts in: the protocol that the rollout node knows, and those that are not AppWorld."""
