"""The way to rollouts: which tasks, from which node or log, and what is asked for."""
