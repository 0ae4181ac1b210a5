"""Prepares a program of ours before libraries are imported."""

import logging
import os
import pwd
import tempfile


def prepare_process() -> None:
    """Set the variables that libraries read when they are imported, for this process and all below it, and quiet what
    torchao says whenever it is imported."""
    # Threads of OpenMP that spin while they wait for each other take the processors from whom they wait for: beside
    # other work, ten times as long. OpenMP reads this when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # In a container under a number that no list of users has, and without HOME, libraries that ask where their caches
    # go raise when they are imported.
    if "HOME" not in os.environ:
        try:
            pwd.getpwuid(os.getuid())
        except KeyError:
            os.environ["HOME"] = tempfile.gettempdir()
            os.environ.setdefault("USER", str(os.getuid()))
    logging.getLogger("torchao").addFilter(is_worth_reading)


def is_worth_reading(record: logging.LogRecord) -> bool:
    """False for torchao's warning that its C++ extensions do not fit this torch.

    It would come with every import of torchtune, before any code of ours; nothing here uses those extensions.
    """
    return not record.getMessage().startswith("Skipping import of cpp extensions due to incompatible torch version")
