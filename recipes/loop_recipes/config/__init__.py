"""Configs: schemas, files that extend each other, and every check that runs before work begins."""
