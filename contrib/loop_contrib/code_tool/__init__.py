"""A box in which an agent runs Python and a shell, with a folder of its own for each episode."""
