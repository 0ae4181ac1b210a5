"""Configs: schemas, files and what they extend, and everything that can be refused before work begins."""
