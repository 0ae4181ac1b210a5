"""Tasksets of the package verifiers, played in a process of another interpreter."""
