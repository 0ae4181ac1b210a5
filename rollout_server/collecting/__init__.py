"""A collection on the node: the choice of the next episode, the episode itself, and the log of finished ones."""
