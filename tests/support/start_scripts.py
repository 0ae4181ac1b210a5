"""Starts scripts with ``--help``, each in a fork of a process that has imported what is slow and none of this project.

python start_scripts.py SCRIPT...    prints {script: [exit status, output]} as JSON
"""

import gc
import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path

import aiohttp.web  # noqa: F401
import httpx  # noqa: F401
import pydantic.dataclasses  # noqa: F401
import torch  # noqa: F401
import torchtune.models.qwen2  # noqa: F401
import transformers  # noqa: F401


def _status(script: str) -> int:
    status: str | int | None = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    return status if isinstance(status, int) else int(status is not None)


def started(script: str) -> tuple[int, str]:
    """Exit status and output of ``python SCRIPT --help``."""
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if pid == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            sys.argv, sys.path[0] = [script, "--help"], str(Path(script).parent)
            os._exit(_status(script))  # to take torch down in order takes a second
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


def main() -> None:
    gc.freeze()  # the forks share what is imported
    print(json.dumps({script: started(script) for script in sys.argv[1:]}))


if __name__ == "__main__":
    main()
