"""The verbs of ``loop``, a file each; each imports what it needs only when it is called."""
