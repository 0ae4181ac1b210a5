"""`python -m rollout_server` is `rollout-server`."""

from rollout_server.cli import main

main()
