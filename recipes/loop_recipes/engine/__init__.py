"""The computing parts: micro-batches, log-probs, sharding, the model and its adapters, checkpoints."""
