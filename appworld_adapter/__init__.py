"""AppWorld as an environment: sealed worlds and a grader apart from them, prompts, datasets, and its metrics."""
