"""Weights on disk and on the hub: names, headers, published sizes."""
