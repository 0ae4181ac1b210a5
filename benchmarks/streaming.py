"""What it would cost the node to stream tokens as vLLM samples them, over passing answers on whole as it does.

    python benchmarks/streaming.py [--json PATH] [--calls 60] [--tokens 64]

A server answers as vLLM's ``/inference/v1/generate`` does, whole or with an event a token. A relay passes that on to a
client of OpenAI's chat API: one JSON object, or an event a token. ``relay_cpu_ms_per_call`` is the CPU time of the
relay's process over its calls. It does less than the node would have to: it decodes nothing, holds back no markup of a
tool call, and records nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from aiohttp import ClientSession, web

PROMPT = list(range(1500))
GAP_S = 0.002
"""Between two tokens: without one they would come in bunches."""
TICKS = os.sysconf("SC_CLK_TCK")
EVENTS = {"Content-Type": "text/event-stream"}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def server(tokens: int) -> web.Application:
    """Answers in the words of vLLM."""

    def said(ids: list[int], finish: str | None) -> dict[str, object]:
        content = [{"token_id": token, "logprob": -0.5, "top_logprobs": []} for token in ids]
        choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": finish}
        return {"request_id": "benchmark", "choices": [choice], "usage": None}

    async def generate(request: web.Request) -> web.StreamResponse:
        if not (await request.json())["stream"]:
            return web.json_response(said(list(range(tokens)), "length"))
        response = web.StreamResponse(headers=EVENTS)
        await response.prepare(request)
        for token in range(tokens):
            told = said([token], "length" if token + 1 == tokens else None)
            await response.write(b"data: " + json.dumps(told).encode() + b"\n\n")
            await asyncio.sleep(GAP_S)
        return response

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/", generate)
    return app


def relay(upstream: str) -> web.Application:
    """Passes on what ``upstream`` answers."""

    async def complete(request: web.Request) -> web.StreamResponse:
        stream = (await request.json())["stream"]
        async with ClientSession() as http, http.post(upstream, json={"token_ids": PROMPT, "stream": stream}) as answer:
            if not stream:
                said = (await answer.json())["choices"][0]["token_ids"]
                return web.json_response({"choices": [{"message": {"content": " word" * len(said)}}]})
            response = web.StreamResponse(headers=EVENTS)
            await response.prepare(request)
            async for line in answer.content:
                if line.startswith(b"data: "):
                    said = json.loads(line[6:])["choices"][0]["token_ids"]
                    told = {"object": "chat.completion.chunk", "choices": [{"delta": {"content": " word" * len(said)}}]}
                    await response.write(b"data: " + json.dumps(told).encode() + b"\n\n")
            return response

    app = web.Application()
    app.router.add_post("/", complete)
    return app


def run(pipe: Connection, build: Callable[..., web.Application], argument: object) -> None:
    """Serve on a free port, which is sent through ``pipe``, until the process is ended."""

    async def forever() -> None:
        runner = web.AppRunner(build(argument), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send(f"http://127.0.0.1:{runner.addresses[0][1]}/")
        await asyncio.Event().wait()

    asyncio.run(forever())


def started(build: Callable[..., web.Application], argument: object) -> tuple[multiprocessing.Process, str]:
    """A process that serves, and its address."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=run, args=(there, build, argument), daemon=True)
    process.start()
    return process, here.recv()


async def measure(url: str, pid: int, stream: bool, calls: int) -> float:
    """Milliseconds of CPU that the relay needs for a call."""

    async with ClientSession() as http:
        for number in range(calls + 1):
            if number == 1:  # the first one's imports and caches are not counted
                before = cpu_seconds(pid)
            async with http.post(url, json={"stream": stream}) as answer:
                await answer.read()
    return 1000 * (cpu_seconds(pid) - before) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    options = parser.parse_args()
    _, upstream = started(server, options.tokens)
    process, url = started(relay, upstream)
    assert process.pid is not None, "it has been started"
    rows = [
        {
            "case": f"{'an event a token' if stream else 'whole'}, {options.tokens} tokens",
            "metric": "relay_cpu_ms_per_call",
            "value": asyncio.run(measure(url, process.pid, stream, options.calls)),
            "unit": "ms",
        }
        for stream in (False, True)
    ]
    for row in rows:
        print(f"{row['case']:<32} {row['metric']:<24} {row['value']:10.3f} {row['unit']}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
