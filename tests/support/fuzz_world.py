"""Feeds a world process's loop what hostile agent code could write to it. Runs under the AppWorld interpreter.

python fuzz_world.py MESSAGES SEED    prints {"messages", "ended", "lived", "grown_mib"} as JSON: episodes that ended
                                      in a grade, and those that went on

Everything is real but the databases: the loop, the channel, and the answering of requests up to the app's transport.
"""

import json
import os
import random
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "appworld_adapter" / "worker"))
sys.path.insert(1, str(Path(__file__).parents[2] / "agent_environments" / "sandbox"))

import httpx
from channel import Channel
from world import ApiWorld, WorldEpisode

ODD = [
    None,
    True,
    -1,
    5,
    1e999,
    float("nan"),
    "",
    "x",
    "\ud800",
    "http://[::1",
    "GET",
    [],
    [[]],
    {},
    {"a": 1},
    "9" * 5000,
]
KEYS = ["id", "request", "output", "ready", "code", "end", "ok", "method", "url", "headers", "body"]


class Transport:
    """In place of the apps."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("raise"):
            raise OverflowError("the app broke")
        return httpx.Response(200, json={"path": request.url.path})


class World(ApiWorld):
    """An ApiWorld whose databases are always saved."""

    def __init__(self) -> None:
        self._prefixes = ("/spotify/",)
        self._transport = Transport()

    def save(self) -> None:
        pass

    def task_completed(self) -> bool:
        return False


def odd_value(rng: random.Random, depth: int = 2) -> object:
    if depth and rng.random() < 0.3:
        return {rng.choice(KEYS): odd_value(rng, depth - 1) for _ in range(rng.randrange(4))}
    return rng.choice(ODD)


def odd_request(rng: random.Random) -> dict[str, object]:
    request = {"method": "GET", "url": "http://localhost/spotify/raise", "headers": [["a", "b"]], "body": ""}
    for key in rng.sample(list(request), rng.randrange(3)):
        request[key] = odd_value(rng)
    return request


def message(rng: random.Random) -> bytes:
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randbytes(rng.randrange(200)) + b"\n"
    if kind == 1:
        return rng.choice([b"[", b'{"a":', b"-", b"9"]) * rng.randrange(1, 3000) + b"\n"
    if kind == 2:
        return json.dumps(odd_value(rng)).encode() + b"\n"
    if kind == 3:
        line = bytearray(json.dumps({"id": 1, "request": odd_request(rng)}).encode() + b"\n")
        line[rng.randrange(len(line))] = rng.randrange(256)
        return bytes(line)
    return json.dumps({"id": odd_value(rng, 0), "request": odd_request(rng)}).encode() + b"\n"


class FuzzedEpisode(WorldEpisode):
    """Its interpreter sends ``script`` as soon as it has a program, and reads nothing."""

    def __init__(self, world: World, script: bytes) -> None:
        self.owner, self.owned = socket.socketpair()
        self.theirs, self.agent = socket.socketpair()
        self.script = script
        super().__init__(Channel(self.owned.fileno()), Channel(self.theirs.fileno()), world, 1000, keep_logs=False)

    def _send_interpreter(self, message: dict[str, object]) -> None:
        super()._send_interpreter(message)
        if "code" in message:
            self.agent.sendall(self.script)
            self.agent.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for each in (self.owner, self.owned, self.theirs, self.agent):
            each.close()


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main(count: int, seed: int) -> None:
    rng, world = random.Random(seed), World()
    messages = ended = lived = 0
    start = 0.0
    while messages < count:
        script = [message(rng) for _ in range(rng.randrange(1, 4))]
        messages += len(script)
        episode = FuzzedEpisode(world, b"".join(script) + b'{"output": "done"}\n')
        answer = episode._execute("x")
        episode.close()
        json.dumps(answer).encode()
        if answer["ok"]:
            assert len(answer["output"].encode()) <= 4000, answer
            lived += 1
        else:
            assert answer["saved"] is True, answer
            assert len(answer["message"]) <= 500, answer
            ended += 1
        if messages < count / 10:
            start = resident_mib()
    print(json.dumps({"messages": messages, "ended": ended, "lived": lived, "grown_mib": resident_mib() - start}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
