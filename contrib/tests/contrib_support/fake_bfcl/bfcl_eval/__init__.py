"""A stand-in of the package ``bfcl-eval``: one scenario of four kinds, with a shelf to put things on."""
