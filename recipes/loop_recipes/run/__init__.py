"""A run's own bookkeeping: its metrics, and whether somebody asked it to stop."""
