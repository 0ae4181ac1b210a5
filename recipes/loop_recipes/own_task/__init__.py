"""Training on a file of functions: what `loop train FILE.py` and `loop try FILE.py` do."""
