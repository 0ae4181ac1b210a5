"""Environments whose agent is a program of its own, which gets the policy's answers from a chat endpoint."""
