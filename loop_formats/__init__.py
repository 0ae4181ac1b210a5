"""Formats that trainer and rollout node share: the rollout's record, ids, requests, run folders, schemas."""
