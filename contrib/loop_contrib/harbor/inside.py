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

from agent_environments.harness.agents import Start, find_agent, write_files
from agent_environments.program_protocol import Connection
from loop_contrib.harbor import forward
from loop_contrib.harbor.tasks import HarborTask

LOOP = "loop"
OPEN_FILES = 256
"""Of this process; an agent's connections take two each."""
_BEGIN = ("bash", "-c", 'mkdir -p "$HOME"; cp -r /loop/home/. "$HOME"; exec "$@"', "agent")
_OF_BACK_END = ("HOME", "XDG_", "CONTAINERS_", "DOCKER_")


def make_entrance() -> Path:
    """Return a new folder that only this user enters; ``loop`` in it is to be mounted into a container."""
    folder = Path(tempfile.mkdtemp(prefix="harbor-"))
    (folder / LOOP / "home").mkdir(parents=True)
    shutil.copy(forward.__file__, folder / LOOP / "forward.py")
    return folder


def describe(entrance: Path, task: HarborTask, client: str, container: str, workdir: str) -> None:
    """Write how a container is entered, and the variables of the back end, which a harness passes to no program."""
    user = [] if task.user is None else [f"--user={task.user}"]
    variables = {name: value for name, value in os.environ.items() if name.startswith(_OF_BACK_END)}
    enter = [client, "exec", f"--workdir={workdir}", *user]
    (entrance / "place.json").write_text(json.dumps([enter, container, variables, task.agent_s]))
    (entrance / LOOP / "prompt.md").write_text(task.instruction)


def start_of(words: Sequence[str], connection: Connection, prompt: str) -> Start:
    """Return the start of a command, or of ``--agent NAME [PROGRAM]``, an agent that a package knows."""
    if words[0] != "--agent":
        return Start(words)
    agent = find_agent(words[1])
    start = agent.start(connection, prompt)
    return Start([*(words[2:] or [agent.program]), *start.command], start.variables, start.files)


async def play(words: Sequence[str]) -> int:
    """Play the episode that the node's variables name; returns the status of the agent's program."""
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    node, inside = urlsplit(url), f"http://{forward.HOST}:{forward.PORT}"
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=60.0) as client:
        asked = (await client.get(f"{url}/episode")).raise_for_status()
    entrance, prompt = (message["content"] for message in asked.json()["messages"])
    enter, container, variables, limit_s = json.loads((Path(entrance) / "place.json").read_text())
    start = start_of(words, Connection(f"{inside}{node.path}", key, "", "", None, 0), prompt)
    told = {"OPENAI_BASE_URL": f"{inside}{node.path}", "OPENAI_API_KEY": key}
    told = {**start.variables, **told, "ANTHROPIC_BASE_URL": inside, "ANTHROPIC_API_KEY": key}
    environment = {**os.environ, **variables, **told}
    names = [f"--env={name}" for name in told]  # values of a command line can be read by other users of the machine
    mounted = Path(entrance) / LOOP
    write_files(mounted / "home", start.files)
    joined = forward.forward(lambda: asyncio.open_connection(node.hostname, node.port or 80))
    async with await asyncio.start_unix_server(joined, mounted / forward.SOCKET):
        for path in (mounted, *mounted.rglob("*")):
            path.chmod(0o777)  # in the container it may be another user's
        words = [*enter, container, "python3", "/loop/forward.py"]
        listens = await create_subprocess_exec(*words, env=environment, stdin=DEVNULL, stdout=PIPE)
        if listens.stdout is None or not await listens.stdout.readline():
            print("no forwarder starts in the container: its image needs python3")
            return 1
        words = [*enter, "--env=HOME=/tmp/loop-home", *names, container, *_BEGIN, *start.command]
        program = await create_subprocess_exec(*words, env=environment, stdin=DEVNULL)
        async with asyncio.timeout(limit_s):
            return await program.wait()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    sys.exit(asyncio.run(play(sys.argv[1:])))
