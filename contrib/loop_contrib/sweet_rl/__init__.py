"""SWEET-RL (arXiv 2503.15478): a critic of turns, and candidates for turns ranked by it."""
