"""Seals a process that runs agent code; the AppWorld worker and ColBench's grader use the same files.

They are imported by file name (``import sandbox``) with :data:`SANDBOX_FOLDER` on the import path, because they run
under any interpreter, AppWorld's included. So they import nothing but the standard library and each other.
"""

from pathlib import Path

SANDBOX_FOLDER = Path(__file__).resolve().parent
