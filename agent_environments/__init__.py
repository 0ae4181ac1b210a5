"""Environments an agent acts in: the protocol that the rollout node knows, and those that are not AppWorld."""

import loop_plumbing  # noqa: F401 - before torch, for the variable that it sets
