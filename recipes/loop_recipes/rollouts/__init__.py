"""The way to rollouts: the tasks of a collection, its request, and the node or log that has it."""
