"""AppWorld behind the environment protocol: sealed worlds, their servers, and the grader apart from them."""
