"""Export: a run's policy as a folder to serve, to merge into its base and to share."""
