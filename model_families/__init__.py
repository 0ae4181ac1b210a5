"""Base models: a family is one file."""
