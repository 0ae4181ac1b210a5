"""A run's own bookkeeping: its metrics, and requests to stop it."""
