"""A sealed Python in which an agent runs code: a session for each episode, with a folder of its own."""
