"""Tasks in folders as Harbor writes them: an agent with a shell in a container, graded in another one."""
