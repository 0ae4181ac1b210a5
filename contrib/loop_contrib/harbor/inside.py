"""An agent's own program in a task's container: the command of a ``harness`` whose world is ``harbor``.

Nothing leads from the container to the host but a folder that is mounted: it holds a Unix socket, which this program
joins to the episode's endpoint, and a forwarder that listens in the container.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, create_subprocess_exec
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from loop_contrib.harbor import forward
from loop_contrib.harbor.tasks import HarborTask

MOUNTED_FOLDER = "loop"
OPEN_FILES = 256
"""The limit of this process; an agent's connections take two each."""
_OF_BACK_END = ("HOME", "XDG_", "CONTAINERS_", "DOCKER_")


def make_entrance(task: HarborTask, client: str, container: str, workdir: str) -> Path:
    """Return a new folder that only this user can enter. Its folder ``loop`` must be mounted into the container.

    A file in it says how to enter the container, with the back end's variables, since a harness does not pass these on.
    """
    folder = Path(tempfile.mkdtemp(prefix="harbor-"))
    (folder / MOUNTED_FOLDER).mkdir()
    shutil.copy(forward.__file__, folder / MOUNTED_FOLDER / "forward.py")
    (folder / MOUNTED_FOLDER / "prompt.md").write_text(task.instruction)
    enter = [client, "exec", f"--workdir={workdir}", *([] if task.user is None else [f"--user={task.user}"])]
    variables = {name: value for name, value in os.environ.items() if name.startswith(_OF_BACK_END)}
    (folder / "place.json").write_text(json.dumps([enter, container, variables, task.agent_s]))
    return folder


async def play(command: Sequence[str]) -> int:
    """Play the episode that the node's variables name. Return the exit status of the command in the container."""
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    node, inside = urlsplit(url), f"http://{forward.HOST}:{forward.PORT}"
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=60.0) as client:
        asked = (await client.get(f"{url}/episode")).raise_for_status()
    entrance = Path(asked.json()["messages"][0]["content"])
    enter, container, variables, limit_s = json.loads((entrance / "place.json").read_text())
    addresses = {"OPENAI_BASE_URL": f"{inside}{node.path}", "OPENAI_API_KEY": key}
    addresses |= {"ANTHROPIC_BASE_URL": inside, "ANTHROPIC_API_KEY": key}
    environment = {**os.environ, **variables, **addresses}
    # By name alone: values of a command line can be read by other users of the machine.
    names = [f"--env={name}" for name in addresses]
    joined = forward.forward(lambda: asyncio.open_connection(node.hostname, node.port or 80))
    async with await asyncio.start_unix_server(joined, entrance / MOUNTED_FOLDER / forward.SOCKET):
        for path in (entrance / MOUNTED_FOLDER, *(entrance / MOUNTED_FOLDER).iterdir()):
            path.chmod(0o777)  # in the container it may be another user's
        words = [*enter, container, "python3", "/loop/forward.py"]
        listens = await create_subprocess_exec(*words, env=environment, stdin=DEVNULL, stdout=PIPE)
        if listens.stdout is None or not await listens.stdout.readline():
            print("no forwarder starts in the container: its image needs python3")
            return 1
        words = [*enter, *names, container, *command]
        program = await create_subprocess_exec(*words, env=environment, stdin=DEVNULL)
        async with asyncio.timeout(limit_s):
            return await program.wait()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    sys.exit(asyncio.run(play(sys.argv[1:])))
