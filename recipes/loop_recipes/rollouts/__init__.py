"""Where rollouts come from: which tasks, from which node or log, and what is asked for."""
