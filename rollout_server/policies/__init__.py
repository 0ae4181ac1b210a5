"""Policy versions on the node: their folders, the checks before one is served, and the users of each."""
