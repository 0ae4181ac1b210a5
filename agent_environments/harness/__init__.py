"""Environments whose agent is a program of its own, which asks a chat endpoint for what the policy says."""
