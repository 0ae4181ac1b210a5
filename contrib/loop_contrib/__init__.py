"""Beside the core: papers' methods, worlds and services, each in a folder of its own.

The core never imports this package. It comes in by the doors that any other package has: entry points
(:mod:`loop_plumbing.plug_ins`) and ``_component_``.
"""
