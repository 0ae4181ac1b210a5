"""Environments an agent acts in: the protocol, AppWorld behind it, and what is measured about episodes."""
