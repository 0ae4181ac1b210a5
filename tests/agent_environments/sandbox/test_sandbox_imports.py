"""The sandbox's files run under any interpreter: nothing but the standard library is imported."""

import subprocess
import sys

from agent_environments.sandbox import SANDBOX_FOLDER
from support.waiting import DEADLINE_S


def test_every_file_imports_without_any_package():
    names = [file.stem for file in sorted(SANDBOX_FOLDER.glob("[a-z]*.py"))]
    assert "sandbox" in names
    program = f"import sys; sys.path.append({str(SANDBOX_FOLDER)!r}); import {', '.join(names)}"
    # -I: neither this folder nor PYTHONPATH; -S: no installed package.
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True, timeout=DEADLINE_S)
