"""Prepares a program of ours before libraries are imported."""

import logging
import os
import pwd
import tempfile

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""The variables in which torchrun tells a process its place among the others."""


def launched(name: str, alone: int) -> int:
    """Return the value of one of :data:`RANKS`; ``alone`` if torchrun has not started this process (an earlier job or
    another launcher may have left such variables)."""
    return int(os.environ[name]) if "TORCHELASTIC_RUN_ID" in os.environ else alone


def prepare_process() -> None:
    """Set the variables that libraries read at import, for this process and all below it, and silence torchao's
    warning."""
    # Threads of OpenMP that spin while they wait for each other take processors from the threads they wait for: beside
    # other work, all takes ten times as long. OpenMP reads this when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # In a container under a number that no list of users has, and without HOME, libraries that ask where their caches
    # go raise when they are imported.
    if "HOME" not in os.environ:
        try:
            pwd.getpwuid(os.getuid())
        except KeyError:
            os.environ["HOME"] = tempfile.gettempdir()
            os.environ.setdefault("USER", str(os.getuid()))
    for name in RANKS if "TORCHELASTIC_RUN_ID" not in os.environ else ():
        os.environ.pop(name, None)  # torchtune reads one, whatever program has left it
    logging.getLogger("torchao").addFilter(is_worth_reading)


def is_worth_reading(record: logging.LogRecord) -> bool:
    """Return False for torchao's warning that its C++ extensions do not fit this torch.

    The warning would come with every import of torchtune, before our code runs; we do not use those extensions.
    """
    return not record.getMessage().startswith("Skipping import of cpp extensions due to incompatible torch version")
