"""Calls the hook of `recipes/loop_recipes/registration.py` at the end of torch's import, where it is installed.

An editable install copies this file into site-packages, too. So programs of that environment go on importing torch when
the checkout is moved or removed.
"""

import os
import sys


def install_hook() -> None:
    """Call the hook of the installed packages; raises nothing."""
    try:
        from loop_recipes import registration
    except Exception as error:
        if os.path.basename(sys.argv[0]) == "tune":  # others do not need us
            cure = "install it again where it lies now: pip install -e FOLDER"
            print(f"torchtune-loop: its recipes are not found ({error}); {cure}", file=sys.stderr)
    else:
        registration.install_hook()
