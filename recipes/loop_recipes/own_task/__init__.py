"""Training on a file of functions: the work of `loop train FILE.py` and `loop try FILE.py`."""
