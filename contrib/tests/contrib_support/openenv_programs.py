"""Programs for an interpreter with the package ``openenv``: its client for our server, and a server for our client.

python openenv_programs.py client URL TOKEN SPLIT INDEX ACTION...   # prints what it saw as one line of JSON
python openenv_programs.py guessing PORT     # a game
python openenv_programs.py tools PORT        # MCP tools
"""

from __future__ import annotations

import asyncio
import json
import sys


async def client(url: str, token: str, split: str, index: str, *actions: str) -> None:
    from openenv.core.generic_client import GenericEnvClient

    async with GenericEnvClient(base_url=url, headers={"Authorization": f"Bearer {token}"}) as env:
        seen = [await env.reset(split=split, index=int(index))]
        seen += [await env.step({"action": action}) for action in actions]
        state = await env.state()
    steps = [[result.observation["text"], result.reward, result.done] for result in seen]
    print(json.dumps({"steps": steps, "state": state}))


def guessing(port: str) -> None:
    import uvicorn
    from openenv.core.env_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Guess(Action):
        number: int

    class Hint(Observation):
        hint: str

    class Guessing(Environment[Guess, Hint, State]):
        """Guess a number; the reward falls with the tries."""

        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._target, self._tries = 0, 0

        def list_splits(self) -> list[str]:
            return ["train", "test"]

        def list_tasks(self, split: str) -> list[dict[str, int]]:
            return [{"target": target} for target in range(3)]

        def reset(self, seed=None, episode_id=None, split="train", index=0, **more) -> Hint:
            self._target, self._tries = int(index) + (10 if split == "test" else 0), 0
            return Hint(hint="Guess a number.")

        def step(self, action: Guess, timeout_s=None, **more) -> Hint:
            self._tries += 1
            guess = action.number
            if guess < 0:
                raise ValueError("it has broken")
            if guess == self._target:
                return Hint(hint="Yes.", done=True, reward=1 / self._tries)
            return Hint(hint="More." if guess < self._target else "Less.", reward=0.0)

        @property
        def state(self) -> State:
            return State(step_count=self._tries)

    app = create_app(Guessing, Guess, Hint, env_name="guessing", max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


def tools(port: str) -> None:
    import uvicorn
    from fastmcp import FastMCP
    from openenv.core.env_server import create_app
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
    from openenv.core.env_server.types import Observation, State

    class Echo(MCPEnvironment):
        """Tools and nothing else, as the package's echo_env."""

        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            server = FastMCP("echo")

            @server.tool
            def echo(message: str) -> str:
                """Says the message again."""
                return message

            super().__init__(server)

        def reset(self, seed=None, episode_id=None, **more) -> Observation:
            return Observation(done=False, reward=0.0, metadata={"status": "ready"})

        def _step_impl(self, action, timeout_s=None, **more) -> Observation:
            return Observation(done=False, reward=0.0)

        @property
        def state(self) -> State:
            return State()

    app = create_app(Echo, CallToolAction, CallToolObservation, env_name="tools", max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    if sys.argv[1] == "client":
        asyncio.run(client(*sys.argv[2:]))
    else:
        {"guessing": guessing, "tools": tools}[sys.argv[1]](sys.argv[2])
