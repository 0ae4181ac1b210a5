"""Worlds that run under an interpreter of their own: the client of a worker, the pool, and one worker file a world."""
