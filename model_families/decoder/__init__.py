"""The decoders of all families, built with torchtune's modules. Nothing else of model_families needs torch."""
