"""The tiny policy from nothing: tokenizer, model, demonstrations and their batches."""
