"""Tools of an MCP server (Model Context Protocol, over stdio) that runs as a child of the rollout node.

One server is shared by all episodes, so its tools are stateless as far as an episode is concerned. The child runs below
:mod:`loop_plumbing.process_guard` and ends with the node, whatever ends the node. It sees the few environment variables
that the ``mcp`` package hands on, and those that the config gives it. A server that dies, or hangs as it starts, is
started again by the next call; nobody can know whether the agent's call killed it, so the agent gets an error, and the
episode goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agent_environments.program_config import variables as environment_variables
from agent_environments.program_config import words
from agent_environments.tools.tool import DEADLINE_S, Tool, ToolError
from loop_plumbing import process_guard
from loop_plumbing.breakage import Raised
from loop_plumbing.deadline import DeadlinePassed
from loop_plumbing.forked_process import SAID_NOTHING
from loop_plumbing.moving import give_sign

try:
    from mcp import Client, MCPError, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp_types import CONNECTION_CLOSED, CallToolResult, ContentBlock, TextResourceContents
except ImportError as error:
    raise ValueError(
        "tools of an MCP server need the package mcp: pip install 'torchtune-loop-contrib[mcp]'"
    ) from error

if TYPE_CHECKING:
    from loop_plumbing.forked_process import ForkedProcess

logger = logging.getLogger(__name__)

START_DEADLINE_S = 600.0
STOP_DEADLINE_S = 15.0
GRACE_S = "1"
"""Seconds between SIGTERM and SIGKILL; the package itself sends SIGKILL after two seconds."""
LAST_WORDS_DEADLINE_S = 5.0
LAST_WORDS_BYTES = 2000
"""Bytes at the end of a server's standard error that are kept."""


class McpTool(Tool):
    """A tool of a server. The episode's process checks the arguments against the server's schema before they are sent,
    because a regular expression of the schema may take very long.
    """

    def __init__(self, server: McpServer, name: str, description: str, parameters: dict[str, Any]) -> None:
        self.name = name
        self.description = description
        self.terminal = name in server.terminal
        self.deadline_s = server.deadline_s
        self._server = server
        self._parameters = parameters

    @property
    def parameters(self) -> dict[str, Any]:
        return self._parameters

    async def call(self, arguments: Mapping[str, Any], process: ForkedProcess) -> str:
        request = {"schema": self._parameters, "arguments": dict(arguments), "within_s": self.deadline_s}
        try:
            await process.ask("check", self.deadline_s, **request)
        except Raised as error:  # a broken schema, such as one with an invalid pattern
            raise ToolError(str(error)) from error
        return await self._server.call(self.name, dict(arguments))


class McpServer:
    """An MCP server and the connection to it.

    Args:
        name: the server's name in error messages.
        command: program and arguments that start the server.
        env: additional environment variables of the server.
        tools: names of the tools to offer; None offers all.
        terminal: names of the tools that end the episode.
        deadline_s: longest time of one call.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        tools: Sequence[str] | None = None,
        terminal: Sequence[str] = (),
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.name = name
        self.terminal = tuple(words(f"mcp.{name}.terminal", terminal))
        self.deadline_s = deadline_s
        self._offered = None if tools is None else tuple(words(f"mcp.{name}.tools", tools))
        own = words(f"mcp.{name}.command", command)
        self._command = shlex.join(own)
        guard = ["-I", process_guard.__file__, str(os.getpid()), GRACE_S, *own]
        variables = environment_variables(f"mcp.{name}.env", env or {})
        self._parameters = StdioServerParameters(command=sys.executable, args=guard, env=variables)
        self._connection: _McpConnection | None = None

    async def open(self, again: bool = True) -> list[Tool]:
        """Start the server and ask for its tools. With ``again``, try once more if the server ends without output.

        Raises:
            ValueError: the server does not start or lacks a configured tool. Names the command and its last line.
        """
        connection = self._connect()
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                client = await connection.client()
                listed, cursor = [], None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    listed += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        break
        except Exception as error:
            await self.close()
            if again and connection.last_words == SAID_NOTHING and not isinstance(error, TimeoutError):
                return await self.open(again=False)
            why = str(error) or type(error).__name__
            words = f"{self._command}: {connection.last_words}"
            raise ValueError(f"MCP server {self.name} does not start: {why}; {words}") from error
        give_sign()
        known = {tool.name for tool in listed}
        for name in (*(self._offered or ()), *self.terminal):
            if name not in known:
                raise ValueError(f"MCP server {self.name} has no tool {name!r}; it has {', '.join(sorted(known))}")
        return [
            McpTool(self, tool.name, tool.description or tool.name, dict(tool.input_schema))
            for tool in listed
            if self._offered is None or tool.name in self._offered
        ]

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool of the server and return the result as text.

        Raises:
            ToolError: the tool failed, or the server died.
            DeadlinePassed: the call took longer than ``deadline_s``.
        """
        connection = self._connect()
        try:
            async with asyncio.timeout(self.deadline_s) as deadline:
                result = await (await connection.client()).call_tool(name, arguments)
        except Exception as error:
            if deadline.expired():
                raise DeadlinePassed(f"took longer than {self.deadline_s:g} s") from error
            if not isinstance(error, MCPError) or error.code == CONNECTION_CLOSED:
                await self._drop(connection)
                words = connection.last_words
                logger.warning("MCP server %s is gone: %r; %s: %s", self.name, error, self._command, words)
            raise ToolError(str(error) or type(error).__name__) from error
        text = _text_of(result)
        if result.is_error:
            raise ToolError(text)
        return text

    async def close(self) -> None:
        """End the server."""
        if self._connection is not None:
            await self._drop(self._connection)

    def _connect(self) -> _McpConnection:
        if self._connection is None:
            self._connection = _McpConnection(self._parameters)
        return self._connection

    async def _drop(self, connection: _McpConnection) -> None:
        if self._connection is connection:
            self._connection = None
        await connection.end()


def _text_of(result: CallToolResult) -> str:
    """Return the blocks of a result as text. If no block is text, return its structured value as JSON; servers should
    repeat that value as text (the protocol asks for it)."""
    texts = [_text_of_block(block) for block in result.content]
    if result.structured_content is not None and not any(block.type == "text" for block in result.content):
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(texts)


def _text_of_block(block: ContentBlock) -> str:
    """Return a block as text. If it has no text, return its type and size."""
    match block.type:
        case "text":
            return block.text
        case "resource":
            resource = block.resource
            if isinstance(resource, TextResourceContents):
                return resource.text
            return f"[resource {resource.uri}: {resource.mime_type or 'binary'}, {_bytes(resource.blob)} bytes]"
        case "resource_link":
            size = "" if block.size is None else f", {block.size} bytes"
            title = ": ".join(filter(None, [block.title or block.name, block.description]))
            return f"[link {block.uri}: {block.mime_type or 'resource'}{size}] {title}"
    return f"[{block.type}: {block.mime_type}, {_bytes(block.data)} bytes]"


def _bytes(base64: str) -> int:
    return len(base64.rstrip("=")) * 3 // 4


class _McpConnection:
    """A child process and its client. One asyncio task opens and closes both, as the MCP package requires."""

    def __init__(self, parameters: StdioServerParameters) -> None:
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._errors = b""
        self._task = asyncio.ensure_future(self._hold(parameters))
        self._listening: asyncio.Task[None] | None = None

    async def client(self) -> Client:
        return await asyncio.shield(self._ready)

    async def end(self) -> None:
        self._over.set()
        if not self._ready.done():  # it is still starting, or hangs there
            self._task.cancel()
        await _ended(self._task, STOP_DEADLINE_S)
        if self._listening is not None:
            await _ended(self._listening, LAST_WORDS_DEADLINE_S)

    @property
    def last_words(self) -> str:
        """Return the last line that the server wrote to its standard error."""
        lines = self._errors.decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), SAID_NOTHING)

    async def _listen(self, pipe: int) -> None:
        """Copy the server's standard error to our own, and keep the end of it."""
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(pipe, "rb"))
        with contextlib.closing(transport):
            while chunk := await reader.read(LAST_WORDS_BYTES):
                self._errors = (self._errors + chunk)[-LAST_WORDS_BYTES:]
                sys.stderr.write(chunk.decode(errors="replace"))

    async def _hold(self, parameters: StdioServerParameters) -> None:
        pipe, errors = os.pipe()
        self._listening = asyncio.ensure_future(self._listen(pipe))
        try:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    # Its own copy of the other end is all that holds the pipe open: it ends with the server.
                    with os.fdopen(errors, "w") as errlog:
                        async with asyncio.timeout(START_DEADLINE_S):
                            client = await stack.enter_async_context(Client(stdio_client(parameters, errlog)))
                except TimeoutError as error:
                    raise TimeoutError(f"it did not start within {START_DEADLINE_S:g} s") from error
                self._ready.set_result(client)
                await self._over.wait()
        except Exception as error:
            self._fail(error)
        finally:
            self._fail(ConnectionError("the server was ended"))

    def _fail(self, error: Exception) -> None:
        """Pass the error to the task, if any, that waits for the start of the server."""
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()


async def _ended(task: asyncio.Task[None], deadline_s: float) -> None:
    _, late = await asyncio.wait([task], timeout=deadline_s)
    for each in late:
        each.cancel()
