"""The path of an iteration's rollouts: advantages, minibatches, the loss, the optimizer's steps."""
