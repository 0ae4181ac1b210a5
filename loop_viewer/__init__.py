"""A local page that shows a run: its curves, its rollouts side by side, every turn and every token."""
