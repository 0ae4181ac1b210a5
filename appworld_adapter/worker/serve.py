"""Warms up and has a process forked for each world, or each grade (:mod:`loop_plumbing.fork_server`).

    python serve.py world|grader FOLDER SOCKET

Runs by path under the AppWorld interpreter, in that folder. The first line of standard input is a JSON object:

    warm_up_task    task whose world is made and closed once, so that processes inherit its modules and caches
    settings        the settings of every process (see world.py and grader.py)
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(1, os.path.abspath(os.path.join(__file__, "../../../agent_environments/sandbox")))
sys.path.append(os.path.abspath(os.path.join(__file__, "../../..")))  # behind the packages of this interpreter

import sandbox
from channel import Channel, ChannelClosed

from loop_plumbing import fork_server

sys.path.pop()  # agent code does not need it


def prepare(role: str, config: dict[str, Any]) -> fork_server.Prepared:
    """Warm up the server of ``role``, and return its processes' main function."""
    if role == "world":
        from world import WorldServer as Server
    else:
        from grader import GraderServer as Server
    server = Server(config["settings"])
    ready = server.warm_up(config["warm_up_task"])
    sandbox.undumpable()
    helper = server.helper

    def play(connection: socket.socket) -> None:
        owner = Channel(connection.detach())
        sandbox.silence((0, 1))
        sandbox.close_descriptors_except({0, 1, 2, owner.descriptor} | ({helper.descriptor} if helper else set()))
        with contextlib.suppress(ChannelClosed):  # the owner hung up
            server.serve(owner)

    return fork_server.Prepared(play, ready, {helper.pid: "the interpreter server"} if helper else {})


def main() -> None:
    role, folder, descriptor = sys.argv[1:]
    os.chdir(folder)
    os.dup2(2, 1)  # the engine may print anything
    config = json.loads(sys.stdin.readline())
    fork_server.serve(socket.socket(fileno=int(descriptor)), lambda: prepare(role, config))
    os._exit(0)


if __name__ == "__main__":
    main()
