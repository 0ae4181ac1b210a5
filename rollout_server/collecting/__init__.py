"""One collection on the node: which episode comes next, the episode itself, and the log of what finished."""
