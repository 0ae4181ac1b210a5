"""Plumbing that every package needs and no subject owns: processes and their owners, an HTTP server, deadlines."""
