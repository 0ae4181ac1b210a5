"""Base models: their families, their weights on disk and on the hub, their chat formats."""
