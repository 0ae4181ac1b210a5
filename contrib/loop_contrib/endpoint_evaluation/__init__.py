"""Scores of models behind chat endpoints, in the same worlds: the key ``endpoint``."""
