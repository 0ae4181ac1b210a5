"""The trainer's side of the rollout node: a blocking client.

Every call except the first contact survives a restart of the node: it is repeated until ``reconnect_s`` have passed.
This is safe, because the node recognises a repeated request. Rollouts are read by cursor, so a dropped connection
neither loses nor repeats one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from agent_environments.description import Description
from loop_formats.collection_request import CollectionEnd, CollectionRequest, Progress
from loop_formats.rollout import Rollout
from loop_formats.run_files import ADAPTER_FILES
from loop_plumbing import running_time
from loop_plumbing.retries import TRANSIENT, asked_to_wait

RETRY_PAUSE_S = 1.0
FULL_S = 7200.0
"""Seconds for which a node may be full (429) without an episode beginning or ending on it."""
STREAM_TIMEOUT_S = 60.0
UPLOAD_TIMEOUT_S = 1800.0
TURN_TIMEOUT_S = 1800.0
"""Above the sum of the node's own deadlines as its servers fall asleep or wake up."""

logging.getLogger("httpx").setLevel(logging.WARNING)  # otherwise a line per request wherever INFO is shown


class RolloutNodeError(RuntimeError):
    """The node refused a request.

    ``status`` is the HTTP status, ``retry_after`` the Retry-After header. While the node makes progress, ``moved``
    differs between one 503 or 429 and the next.
    """

    def __init__(self, status: int, message: str, retry_after: str | None = None, moved: object = None):
        super().__init__(message)
        self.status, self.retry_after, self.moved = status, retry_after, moved


class NodeUnreachable(RuntimeError):
    """Nothing answers at the node's URL."""


class CollectionFailed(RuntimeError):
    """A collection lost too many rollouts, met a full disk or was cancelled; ``end`` holds the reason."""

    def __init__(self, message: str, end: CollectionEnd):
        super().__init__(message)
        self.end = end


@dataclass(frozen=True)
class TaskList:
    """The task ids of a split, and the name of their dataset."""

    dataset: str
    tasks: list[str]


@dataclass(frozen=True)
class PublishedPolicy:
    """A policy version that the node serves under ``name``; publishing took ``seconds``."""

    version: int
    name: str
    seconds: float


class RolloutClient:
    """A client of one rollout node.

    Args:
        url: ``http://host:port``.
        token: the node's bearer token; "" sends no token, and only :meth:`health` works then.
        timeout_s: time limit of one ordinary request.
        reconnect_s: how long a call retries while the node is starting or cannot be reached.
        alive: called before every retry; raises if waiting is useless. Example: ``NodeProcess.check``.

    Attributes:
        on_progress: called with one line: the node's state while the client waits, or why a try failed.
    """

    def __init__(
        self,
        url: str,
        token: str,
        timeout_s: float = 60.0,
        reconnect_s: float = 600.0,
        alive: Callable[[], None] = lambda: None,
    ):
        try:
            address = httpx.URL(url)
        except httpx.InvalidURL:
            address = httpx.URL()
        if address.scheme not in ("http", "https") or not address.host:
            raise ValueError(f"rollout node URL {url!r} must look like http://host:port")
        running_time.tick()
        self.url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=timeout_s,
            verify=ssl.create_default_context(),  # the system's certificates
            trust_env=False,  # a proxy for the internet does not lead to a node beside us
            limits=httpx.Limits(max_keepalive_connections=0),  # an idle connection would not outlive the node
        )
        self._reconnect_s = reconnect_s
        self._alive = alive
        self.on_progress: Callable[[str], None] = lambda line: None

    def health(self) -> dict[str, Any]:
        """Return the node's state, ready or not. Raises NodeUnreachable at once if no node answers."""
        try:
            return self._decoded(self._http.get("/health"))
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def wait_ready(self, deadline_s: float) -> dict[str, Any]:
        """Wait until the node is ready, and return its health.

        Raises:
            NodeUnreachable: the node failed, or gave no sign of life for ``deadline_s``. ``alive`` may raise more.
        """
        patience = self.patience(deadline_s)
        while True:
            try:
                report = self._decoded(self._http.get("/health"))
            except httpx.TransportError as error:
                patience(error)
                continue
            if report.get("status") == "ok":
                return report
            if report.get("status") == "failed":
                raise NodeUnreachable(f"the rollout node at {self.url} gave up: {report['reason']}")
            summary = f"it is {report['status']}" if "status" in report else report["error"]
            state = "; ".join([summary, *report.get("waits_for", [])])
            patience(RolloutNodeError(503, state, moved=report.get("moved")))

    def tasks(self, split: str) -> TaskList:
        return TaskList(**self._call("GET", "/v1/tasks", params={"split": split}))

    def description(self) -> Description:
        """Return the environment's description of itself."""
        return Description.from_dict(self._call("GET", "/v1/environment"))

    def status(self) -> dict[str, Any]:
        """Return the state of servers, policies and collections."""
        return self._call("GET", "/v1/status")

    def start_collection(self, request: CollectionRequest) -> str:
        """Start the collection, or find it if it was started before. Return its state."""
        return self._call("POST", "/v1/collections", json=request.to_dict())["state"]

    def collections(self) -> list[dict[str, Any]]:
        """Return the id, state, progress and ``seconds`` of each collection that is open, or ended not long ago."""
        return self._call("GET", "/v1/collections")["collections"]

    def end_early(self, collection_id: str) -> str:
        """End the collection and drop its running episodes, if every task has reached its floor. Return how it ends or
        has ended. Raises RolloutNodeError (409) if a task is below its floor."""
        return self._call("POST", f"/v1/collections/{quote(collection_id)}/end")["state"]

    def cancel(self, collection_id: str) -> str:
        """Cancel the collection and abort its running episodes; finished episodes stay on the node's disk. Return how
        the collection ends or has ended."""
        return self._call("DELETE", f"/v1/collections/{quote(collection_id)}")["state"]

    def rollouts(self, collection_id: str, after: int = 0) -> RolloutStream:
        """Return the collection's rollouts from cursor ``after`` on, as they finish; see :class:`RolloutStream`."""
        return RolloutStream(self, collection_id, after)

    def publish_policy(
        self, version: int, folder: str | Path, canary: Mapping[str, Any] | None = None
    ) -> PublishedPolicy:
        """Upload the adapter (PEFT format) in ``folder``. Raises RolloutNodeError when the node refuses it."""
        paths = [Path(folder) / name for name in ADAPTER_FILES]
        missing = [str(path) for path in paths if not path.is_file()]
        if missing:
            raise FileNotFoundError(f"no adapter to publish: {missing[0]} is missing")
        with contextlib.ExitStack() as opened:
            answer = self._call(
                "PUT",
                f"/v1/policies/{version}",
                files={path.name: opened.enter_context(path.open("rb")) for path in paths},
                data={} if canary is None else {"canary": json.dumps(canary)},
                timeout=UPLOAD_TIMEOUT_S,
            )
        return PublishedPolicy(**answer)

    def retire_policy(self, version: int) -> None:
        """Make the node remove a version once no episode uses it any more."""
        self._call("DELETE", f"/v1/policies/{version}")

    def sleep(self) -> None:
        """Make the node's servers give their GPUs to the trainer. Return when the GPUs are free.

        Raises:
            RolloutNodeError: the servers share no GPU. NodeUnreachable: a server does not release its GPU.
        """
        self._call("POST", "/v1/servers/sleep", timeout=TURN_TIMEOUT_S)

    def wake(self) -> None:
        """Give the GPUs back to the servers. Return when one server has proven that it has the right versions."""
        self._call("POST", "/v1/servers/wake", timeout=TURN_TIMEOUT_S)

    def _call(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        """Send a request, retry while the node is away or full, and return the decoded answer. ``content`` is as in
        httpx.request."""
        patience, while_full = self.patience(), self.patience(FULL_S if self._reconnect_s else 0.0)
        while True:
            try:
                response = self._http.request(method, path, **content)
            except httpx.TransportError as error:
                patience(error)
                continue
            if response.is_success and (answer := _object(response)) is not None:
                return answer
            refusal = self._refusal(response)
            if refusal.status not in TRANSIENT:
                raise refusal
            (while_full if refusal.status == 429 else patience)(refusal)

    def _decoded(self, response: httpx.Response) -> dict[str, Any]:
        answer = _object(response)
        if answer is None:
            return {"error": f"{self.url} answers {response.status_code} and no JSON; is it a rollout node?"}
        return answer

    def _refusal(self, response: httpx.Response) -> RolloutNodeError:
        body = self._decoded(response)
        message = f"rollout node: {body.get('error', '')}"
        return RolloutNodeError(response.status_code, message, response.headers.get("Retry-After"), body.get("moved"))

    def patience(self, seconds: float | None = None) -> Callable[[Exception], None]:
        """Return a function to call with the error of each failed try. The function waits a little. After ``seconds``
        (default ``reconnect_s``) without a sign of life it raises NodeUnreachable."""
        limit_s = self._reconnect_s if seconds is None else seconds
        give_up, moved = running_time.now() + limit_s, None

        def wait(error: Exception) -> None:
            nonlocal give_up, moved
            self._alive()
            self.on_progress(str(error) or type(error).__name__)
            if isinstance(error, RolloutNodeError) and error.moved != moved:
                give_up, moved = running_time.now() + limit_s, error.moved
            elif running_time.now() > give_up:
                if isinstance(error, RolloutNodeError):  # it answers
                    raise NodeUnreachable(
                        f"the node at {self.url} is not ready after {limit_s:g} s: {error}; see its log"
                    )
                raise self._unreachable(error) from error
            time.sleep(asked_to_wait(getattr(error, "retry_after", None), RETRY_PAUSE_S))

        return wait

    def _unreachable(self, error: Exception) -> NodeUnreachable:
        reason = str(error) or type(error).__name__
        return NodeUnreachable(f"no rollout node at {self.url} ({reason}); start it with `loop node` or fix the URL")

    def read_lines(self, path: str, **content: Any) -> Iterator[dict[str, Any]]:
        """Yield each object of an NDJSON answer as it arrives.

        Raises:
            RolloutNodeError: the node refuses the request. httpx.TransportError: the connection broke.
        """
        with self._http.stream("GET", path, timeout=STREAM_TIMEOUT_S, **content) as response:
            if response.status_code != 200:
                response.read()
                raise self._refusal(response)
            for line in response.iter_lines():
                try:
                    item = json.loads(line)
                except ValueError as error:
                    raise httpx.ReadError("a line was cut short") from error
                yield item


class RolloutStream:
    """Iterates over a collection: yields each :class:`Rollout` and, in between, :class:`Progress`.

    ``cursor`` is the position of the last yielded rollout. ``end`` is set once the iteration is over. After a dropped
    connection the stream continues at the cursor.

    Raises (while iterating):
        CollectionFailed: the collection failed or was cancelled; raised after all finished rollouts have been yielded.
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
            path = f"/v1/collections/{quote(self._id)}/rollouts"
            try:
                for item in self._client.read_lines(path, params={"after": self.cursor}):
                    patience = self._client.patience()
                    match item:
                        case {"cursor": int(cursor), "rollout": dict(rollout)}:
                            self.cursor = cursor
                            yield Rollout.from_dict(rollout)
                        case {"heartbeat": True, "progress": dict(progress)}:
                            yield Progress(**progress)
                        case {"end": dict(end)}:
                            self.end = CollectionEnd.from_dict(end)
                if self.end is None:
                    raise httpx.ReadError("the stream broke off")
            except httpx.TransportError as error:
                patience(error)
            except RolloutNodeError as error:
                if error.status not in TRANSIENT:
                    raise
                patience(error)
        if self.end.error is not None:
            raise CollectionFailed(f"collection {self._id} {self.end.reason}: {self.end.error}", self.end)


def _object(response: httpx.Response) -> dict[str, Any] | None:
    """Return the JSON object in an answer; None if the answer is not one, such as a proxy's page."""
    try:
        answer = response.json()
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None
