"""Environments behind a service: clients for OpenEnv and AgentGym, and a server that serves any pool by both."""
