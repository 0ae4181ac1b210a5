"""The learner: from rollouts to advantages, batches, losses, optimizer steps, adapters and checkpoints."""
