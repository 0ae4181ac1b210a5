"""Model families: the build of their decoders, and the decoders that no family describes."""
