"""Whole agents as their packages publish them: how each is started so that the policy answers it (docs/agents.md)."""
