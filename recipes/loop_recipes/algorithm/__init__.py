"""What becomes of rollouts in an iteration: advantages, minibatches, the loss, the optimizer's steps."""
