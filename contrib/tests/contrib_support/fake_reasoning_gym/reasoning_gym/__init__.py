"""The part of the package `reasoning-gym` 0.1 that our worker uses, for tests: sums, and datasets with its faults."""

from reasoning_gym.factory import create_dataset

__all__ = ["create_dataset"]
