"""What a model family says of its decoder, and the decoders that torchtune builds of it."""
