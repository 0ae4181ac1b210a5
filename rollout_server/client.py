"""The trainer's side of the rollout node: a blocking client on the standard library alone.

Every call but the first contact outlives a restart of the node: it is repeated until ``reconnect_s`` have passed, which
is safe because the node takes a repeated request for the same one. Rollouts are read by cursor, so a dropped connection
neither loses nor repeats one.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_server.collection_request import CollectionEnd, CollectionRequest, Progress
from rollout_server.rollout import Rollout
from rollout_server.run_files import ADAPTER_FILES

RETRY_PAUSE_S = 1.0
STREAM_TIMEOUT_S = 60.0
UPLOAD_TIMEOUT_S = 1800.0
MAX_LINE_BYTES = 1 << 30
_TRANSPORT_ERRORS = (OSError, http.client.HTTPException)


class RolloutNodeError(RuntimeError):
    """The node refused a request; ``status`` is the HTTP status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class NodeUnreachable(RuntimeError):
    """Nothing answers at the node's URL."""


class CollectionFailed(RuntimeError):
    """A collection ended without reaching its floors, or was cancelled; ``end`` says how."""

    def __init__(self, message: str, end: CollectionEnd):
        super().__init__(message)
        self.end = end


@dataclass(frozen=True)
class TaskList:
    """Task ids of a split, and the name of the dataset they are from."""

    dataset: str
    tasks: list[str]


@dataclass(frozen=True)
class PublishedPolicy:
    """A policy version that the node serves, under ``name``; ``seconds`` is what the node needed."""

    version: int
    name: str
    seconds: float


class RolloutClient:
    """One rollout node.

    Args:
        url: ``http://host:port``.
        token: the node's bearer token.
        timeout_s: bound of one ordinary request.
        reconnect_s: how long a call goes on trying while the node cannot be reached or is starting.
        alive: called before every further try; it raises when waiting is in vain, such as ``NodeProcess.check``.
    """

    def __init__(
        self,
        url: str,
        token: str,
        timeout_s: float = 60.0,
        reconnect_s: float = 600.0,
        alive: Callable[[], None] = lambda: None,
    ):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"rollout node URL {url!r} must look like http://host:port")
        self.url = url.rstrip("/")
        self._parts = parts
        self._headers = {"Authorization": f"Bearer {token}"}
        self._timeout_s = timeout_s
        self._reconnect_s = reconnect_s
        self._alive = alive

    def health(self) -> dict[str, Any]:
        """The node's state, ready or not. Raises NodeUnreachable at once when there is none."""
        try:
            _, report = self._send("GET", "/health", None, {}, self._timeout_s)
        except _TRANSPORT_ERRORS as error:
            raise self._unreachable(error) from error
        return report

    def wait_ready(self, deadline_s: float, alive: Callable[[], None] | None = None) -> dict[str, Any]:
        """Wait until the node is ready; returns its health.

        Raises:
            NodeUnreachable: it was not ready after ``deadline_s``; or whatever ``alive`` raises.
        """
        give_up = time.monotonic() + deadline_s
        while True:
            (alive or self._alive)()
            try:
                report = self.health()
                if report.get("status") == "ok":
                    return report
                state = f"is {report.get('status')}"
            except NodeUnreachable as error:
                state = f"does not answer ({error.__cause__})"
            if time.monotonic() > give_up:
                raise NodeUnreachable(f"the rollout node at {self.url} {state} after {deadline_s:g} s; see its log")
            time.sleep(0.25)

    def tasks(self, split: str) -> TaskList:
        return TaskList(**self._call("GET", f"/v1/tasks?{urllib.parse.urlencode({'split': split})}"))

    def status(self) -> dict[str, Any]:
        """The state of servers, policies and collections."""
        return self._call("GET", "/v1/status")

    def start_collection(self, request: CollectionRequest) -> str:
        """Start it, or find it again; returns its state."""
        return self._call("POST", "/v1/collections", request.to_dict())["state"]

    def cancel(self, collection_id: str) -> None:
        """Abort what runs; what is finished stays on the node's disk."""
        self._call("DELETE", f"/v1/collections/{urllib.parse.quote(collection_id)}")

    def rollouts(self, collection_id: str, after: int = 0) -> RolloutStream:
        """The collection's rollouts from cursor ``after`` on, as they finish; see :class:`RolloutStream`."""
        return RolloutStream(self, collection_id, after)

    def publish_policy(
        self, version: int, folder: str | Path, canary: Mapping[str, Any] | None = None
    ) -> PublishedPolicy:
        """Upload the adapter (PEFT format) in ``folder``. Raises RolloutNodeError when the node refuses it."""
        files = [Path(folder) / name for name in ADAPTER_FILES]
        missing = [str(file) for file in files if not file.is_file()]
        if missing:
            raise FileNotFoundError(f"no adapter to publish: {missing[0]} is missing")
        body = _Multipart(files, {} if canary is None else {"canary": json.dumps(canary)})
        return PublishedPolicy(**self._call("PUT", f"/v1/policies/{version}", body, UPLOAD_TIMEOUT_S))

    def retire_policy(self, version: int) -> None:
        """Have the node let go of a version when no episode uses it any more."""
        self._call("DELETE", f"/v1/policies/{version}")

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return kind(self._parts.hostname, self._parts.port, timeout=timeout_s)

    def _send(
        self, method: str, path: str, body: Any, headers: dict[str, str], timeout_s: float
    ) -> tuple[int, dict[str, Any]]:
        connection = self._connect(timeout_s)
        try:
            # A node that refuses an upload by its size answers before it has read it: the answer counts, not the break.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, self._parts.path.rstrip("/") + path, body, {**self._headers, **headers})
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        try:
            decoded = json.loads(data)
        except ValueError:
            decoded = {"error": f"{self.url} answers {answer.status} and no JSON; is it a rollout node?"}
        return answer.status, decoded

    def _call(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> dict[str, Any]:
        """One request, repeated while the node is away; returns the decoded answer."""
        patience = self.patience()
        while True:
            if isinstance(body, _Multipart):
                data, headers = body.chunks(), {"Content-Type": body.content_type, "Content-Length": str(body.size)}
            else:
                data, headers = (None, {}) if body is None else (json.dumps(body), {"Content-Type": "application/json"})
            try:
                status, answer = self._send(method, path, data, headers, timeout_s or self._timeout_s)
            except _TRANSPORT_ERRORS as error:
                patience(error)
                continue
            message = answer.get("error", "")
            if status == 503:
                patience(RolloutNodeError(status, message))
                continue
            if status >= 400:
                raise RolloutNodeError(status, f"rollout node: {message}")
            return answer

    def patience(self) -> Callable[[Exception], None]:
        """A function that is told of each failed try: it waits a little, or raises once ``reconnect_s`` are over."""
        give_up = time.monotonic() + self._reconnect_s

        def wait(error: Exception) -> None:
            self._alive()
            if time.monotonic() > give_up:
                raise self._unreachable(error) from error
            time.sleep(RETRY_PAUSE_S)

        return wait

    def _unreachable(self, error: Exception) -> NodeUnreachable:
        return NodeUnreachable(f"no rollout node at {self.url} ({error}); start it with rollout-server or fix the URL")

    def read_lines(self, path: str) -> Iterator[dict[str, Any]]:
        """The objects of an NDJSON answer; ends when the connection does. Raises RolloutNodeError, OSError."""
        connection = self._connect(STREAM_TIMEOUT_S)
        try:
            connection.request("GET", self._parts.path.rstrip("/") + path, headers=self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                text = answer.read().decode(errors="replace")
                raise RolloutNodeError(answer.status, f"rollout node: {text}")
            while (line := answer.readline(MAX_LINE_BYTES)).endswith(b"\n"):
                yield json.loads(line)
        finally:
            connection.close()


class RolloutStream:
    """Iterates over a collection: yields :class:`Rollout` and, in between, :class:`Progress`.

    ``cursor`` is that of the last rollout yielded, ``end`` is set once the iteration is over. A dropped connection is
    taken up again at the cursor.

    Raises (while iterating):
        CollectionFailed: it ended without reaching its floors, after all that was finished has been yielded.
        NodeUnreachable: the node stayed away for ``reconnect_s``.
        RolloutNodeError: the node knows no such collection.
    """

    def __init__(self, client: RolloutClient, collection_id: str, after: int):
        self._client = client
        self._id = collection_id
        self.cursor = after
        self.end: CollectionEnd | None = None

    def __iter__(self) -> Iterator[Rollout | Progress]:
        patience = self._client.patience()
        while self.end is None:
            path = f"/v1/collections/{urllib.parse.quote(self._id)}/rollouts?after={self.cursor}"
            try:
                for item in self._client.read_lines(path):
                    patience = self._client.patience()
                    match item:
                        case {"cursor": int(cursor), "rollout": dict(rollout)}:
                            self.cursor = cursor
                            yield Rollout.from_dict(rollout)
                        case {"heartbeat": True, "progress": dict(progress)}:
                            yield Progress(**progress)
                        case {"end": dict(end)}:
                            self.end = CollectionEnd(**end)
                if self.end is None:
                    raise ConnectionResetError("the stream broke off")
            except _TRANSPORT_ERRORS as error:
                patience(error)
            except RolloutNodeError as error:
                if error.status != 503:
                    raise
                patience(error)
        if self.end.error is not None:
            raise CollectionFailed(f"collection {self._id} {self.end.reason}: {self.end.error}", self.end)


class _Multipart:
    """A multipart/form-data body of files and texts, sent in chunks so that a large adapter is never in memory."""

    def __init__(self, files: list[Path], texts: Mapping[str, str]):
        boundary = uuid.uuid4().hex
        self.content_type = f"multipart/form-data; boundary={boundary}"
        head = "--" + boundary + '\r\nContent-Disposition: form-data; name="{0}"'
        self._parts: list[bytes | Path] = []
        for name, text in texts.items():
            self._parts.append(f"{head.format(name)}\r\n\r\n{text}\r\n".encode())
        for file in files:
            self._parts += [f'{head.format(file.name)}; filename="{file.name}"\r\n\r\n'.encode(), file, b"\r\n"]
        self._parts.append(f"--{boundary}--\r\n".encode())
        self.size = sum(len(part) if isinstance(part, bytes) else os.path.getsize(part) for part in self._parts)

    def chunks(self) -> Iterator[bytes]:
        for part in self._parts:
            if isinstance(part, bytes):
                yield part
                continue
            with open(part, "rb") as file:
                while chunk := file.read(1 << 20):
                    yield chunk
