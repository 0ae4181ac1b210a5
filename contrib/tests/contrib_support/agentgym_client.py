"""Drives a service with a client class of AgentGym's own code, a subclass of its ``BaseEnvClient``.

    python agentgym_client.py SOURCE MODULE CLASS URL INDEX ACTION...

SOURCE is the folder ``agentenv`` of a checkout of AgentGym. Prints what the client observed as one line of JSON. The
package's own ``__init__`` files are passed over: they import its trainers, and these all that they train with.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from dataclasses import astuple
from pathlib import Path


class Lenient(types.ModuleType):
    """A package whose modules are there, and whose other names are placeholders."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


def package(name: str, folder: Path) -> Lenient:
    module = sys.modules[name] = Lenient(name)
    module.__path__ = [str(folder)]
    return module


def main(source: str, module: str, kind: str, url: str, index: str, *actions: str) -> None:
    root = Path(source) / "agentenv"
    for name in ("", ".controller", ".envs"):
        package(f"agentenv{name}", root / name.removeprefix("."))
    base = importlib.import_module("agentenv.controller.env").BaseEnvClient
    sys.modules["agentenv.controller"].BaseEnvClient = base
    client = getattr(importlib.import_module(f"agentenv.envs.{module}"), kind)(url, 1)
    assert isinstance(client, base)
    client.reset(int(index))
    opening = client.observe()
    steps = [astuple(client.step(action)) for action in actions]
    print(json.dumps({"opening": opening, "steps": steps, "observed": client.observe()}))
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
