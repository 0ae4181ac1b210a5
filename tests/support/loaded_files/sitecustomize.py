"""Python runs this first in each process that has the folder on its PYTHONPATH: it notes which files are run there.

Each file of the checkout that a process imports, or runs as a program, is a line of the file ``LOADED_FILES``, at once,
so that a process that is killed has its lines too. Those of the scoring are lines of ``LOADED_FILES.scoring``.
PYTHONPROFILEIMPORTTIME leaves out programs, and all that ``importlib.import_module`` loads.
"""

import os
import sys
from pathlib import Path

CHECKOUT = f"{Path(__file__).resolve().parents[3]}{os.sep}"
INSTALLED = f"{os.sep}site-packages{os.sep}"

lines = os.environ["LOADED_FILES"]
if "eval_appworld" in sys.orig_argv and not lines.endswith(".scoring"):
    lines = os.environ["LOADED_FILES"] = f"{lines}.scoring"  # for its node and servers too


def note(event, arguments):
    if event == "exec" and getattr(arguments[0], "co_name", None) == "<module>":
        name = arguments[0].co_filename
        if name.startswith(CHECKOUT) and INSTALLED not in name:
            with open(lines, "a", encoding="utf-8") as file:
                file.write(f"{name}\n")


sys.addaudithook(note)
