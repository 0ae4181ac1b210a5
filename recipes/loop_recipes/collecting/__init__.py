"""The trainer's side of collecting: which tasks to ask for, and where their rollouts come from."""
