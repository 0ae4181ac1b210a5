"""`loop-launch`: checks a job before it is queued, and starts its rollout node."""
