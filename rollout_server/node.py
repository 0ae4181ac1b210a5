"""The rollout node: environments, servers, policies and collections, wired together.

The node gives its slots (``max_concurrent_episodes``) to the collections in the order in which they were opened: a
later one gets the slots that earlier ones have no episode for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_environments.description import Description, description_of
from agent_environments.protocol import ProgramPool, UnknownTask, create_pool
from agent_environments.shared_grade import refuse_shared_grade
from loop_formats.branch import Branch, BranchStart
from loop_formats.collection_request import CollectionRequest, is_collection_id
from loop_formats.folder_lock import lock_folder
from loop_formats.ids import parse_collection_id
from loop_formats.run_files import COLLECTIONS, NODE_ADDRESS, NODE_LOCK, NODE_SECRET, write_whole
from loop_formats.schema import made_folder
from loop_plumbing import moving
from model_families.base_model import BaseModel, model_digest
from model_families.opening import check_served_as, open_model_chat, open_weights
from rollout_server.collecting.attempt import Attempt
from rollout_server.collecting.collector import EpisodeKey
from rollout_server.collecting.episode import Episode
from rollout_server.collecting.policy_sampler import EpisodeServices
from rollout_server.collecting.rollout_log import beside
from rollout_server.collecting.run import CollectionRun, StoredCollection
from rollout_server.collecting.sampling_client import SamplingClient
from rollout_server.config import NodeConfig
from rollout_server.inference.router import Router
from rollout_server.inference.server_group import ServerGroup
from rollout_server.metrics import NodeMetrics
from rollout_server.policies.store import PolicyStore, UnknownPolicy

if TYPE_CHECKING:
    from agent_environments.program_protocol import Offer
    from rollout_server.endpoint.endpoint import Endpoint

logger = logging.getLogger(__name__)

MAX_OPEN_COLLECTIONS = 1024
"""Each may be one group of a stream."""
MAX_ENDED_COLLECTIONS, MAX_SHOWN_COLLECTIONS = 200, 20
RETRIED_ENDS = ("failed", "cancelled")
"""Ends after which a collection that is asked for again goes on."""
STOP_DEADLINE_S = 90.0
DRAIN_S = 60.0
"""Seconds for turns under way before the servers sleep; then they are aborted, and sampled again afterwards."""


class RequestError(Exception):
    """A refused request, with an HTTP status and a message of one line."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Node:
    """Everything behind the HTTP routes. Build it, :meth:`start` it, :meth:`stop` it.

    Raises:
        ValueError: a model, environment or option cannot be used. Nothing has been started then.
    """

    def __init__(self, config: NodeConfig):
        self.config = config
        self.root = Path(config.root).resolve()
        for name in (COLLECTIONS, "policies", "logs"):
            made_folder("root", self.root / name)
        self._lock = lock_folder(self.root, NODE_LOCK, "rollout node", "root")
        self.remove_address()  # an earlier node that was killed left one
        model = config.model
        # Servers elsewhere have the weights there.
        base = (open_weights if config.servers.urls is None else BaseModel.read)(model.path)
        check_served_as(model.path, base, model.max_context, model.dtype)
        self.tokens = open_model_chat(model.path, base, model.thinking, model.observation_role)
        self._model_digest = model_digest(config.model.path)
        self.pool = create_pool(config.environment.name, config.environment.options, self.tokens.spans)
        self.servers = ServerGroup(config.model, config.servers, self.root / "logs")
        self.policies = PolicyStore(self.servers, config.model, config.servers, self.root / "policies")
        self.router = Router(self.servers, config.servers.max_num_seqs)
        self.metrics = NodeMetrics()
        self.metrics.watch(self.status)
        self.ready = False
        self.failure: str | None = None
        """The reason why the node is about to end by itself, in one line."""
        self.stopping = asyncio.Event()
        self._opening_since: float | None = None
        self._services = EpisodeServices(self.pool, self.tokens, self.router, self.policies, self.metrics)
        self.endpoint: Endpoint | None = None
        if config.endpoint or isinstance(self.pool, ProgramPool):
            from rollout_server.endpoint.endpoint import Endpoint  # 2,200 lines that only agents of your own need

            self.endpoint = Endpoint(self._services, config.model.max_context)
        self._runs: dict[str, CollectionRun] = {}
        self._opening = asyncio.Lock()
        self._taking_turns = asyncio.Lock()
        self._trainers_turn = self.root / "trainers_turn"
        if config.servers.share is not None and self._trainers_turn.exists():
            self.servers.rest()

    @property
    def description(self) -> Description:
        """The environment's description of itself."""
        return description_of(self.config.environment.name, self.pool)

    async def start(self) -> None:
        """Open the environment, restore the policies from disk and start the servers. Return when all is ready."""
        await self.policies.restore()
        await self.router.start()
        try:
            # Together, because each takes its time; the first to fail cancels the other.
            async with asyncio.TaskGroup() as group:
                group.create_task(self._open_environment())
                group.create_task(self.servers.start())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        self.ready = True
        logger.info("ready: dataset %s, policy versions %s", self.pool.dataset, self.policies.versions())

    async def _open_environment(self) -> None:
        self._opening_since = time.monotonic()
        try:
            await self.pool.open()
        except TimeoutError as error:
            waited = time.monotonic() - self._opening_since
            why = f": {error}" if str(error) else ""
            raise TimeoutError(f"{self.config.environment.name} was not open after {waited:.0f} s{why}") from error
        self._opening_since = None

    async def sleep(self) -> None:
        """Begin the trainer's turn, and return when the servers' GPUs are free. The state is stored on disk.

        The node waits up to :data:`DRAIN_S` for turns under way. No episode begins, and running episodes wait.

        Raises:
            RequestError: 409 where the servers share nothing.
            ServerAwake: a server still holds its GPU's memory; ask again.
        """
        self._check_shares()
        async with self._taking_turns:
            await asyncio.to_thread(self._trainers_turn.touch)
            self.servers.rest()
            await self.router.drain(DRAIN_S)
            await self.policies.settled()
            await self.servers.sleep()
            logger.info("the servers sleep: it is the trainer's turn")

    async def wake(self) -> None:
        """End the trainer's turn. Return when one server is ready and has proven every policy version again.

        Raises:
            RequestError: 409 where the servers share nothing.
            ServerUnavailable: no server is ready yet; ask again.
        """
        self._check_shares()
        async with self._taking_turns:
            await asyncio.to_thread(self._trainers_turn.unlink, missing_ok=True)
            await self.servers.wake()
            self._pump()
            await self.policies.wait_for_server()

    def _check_shares(self) -> None:
        if self.config.servers.share is None:
            raise RequestError(409, "the servers share no GPU with a trainer; set servers.share: trainer")

    async def until_given_up(self) -> None:
        """Wait until no server is left that might come back. ``failure`` then holds the reason."""
        self.failure = f"no vLLM server is left: {await self.servers.given_up()}"

    def waits_for(self) -> list[str]:
        """Return a line for each part of the node that is not ready: name, activity, and for how long."""
        lines = self.servers.waits_for()
        if self._opening_since is not None:
            waited = time.monotonic() - self._opening_since
            lines.append(f"environment {self.config.environment.name} opens, for {waited:.0f} s")
        return lines

    async def stop(self) -> None:
        """Abort the running episodes and end all children within a bounded time. Collections can continue later."""
        self.ready = False
        self.stopping.set()
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                await asyncio.gather(*(run.suspend() for run in self._runs.values()))
        except TimeoutError:
            logger.error("episodes did not stop within %g s", STOP_DEADLINE_S)
        if self.endpoint is not None:
            await self.endpoint.close_all()
        await self.router.close()
        results = await asyncio.gather(self.pool.close(), self.servers.stop(), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                logger.error("while stopping: %r", result)
        self._lock.close()

    def health(self) -> dict[str, Any]:
        if self.failure is not None:
            return {"status": "failed", "reason": self.failure}
        if self.stopping.is_set():
            return {"status": "stopping"}
        if not self.ready:
            return {"status": "starting", "waits_for": self.waits_for(), "moved": moving.signs()}
        return {
            "status": "ok",
            "policy_versions": self.policies.versions(),
            "dataset": self.pool.dataset,
            "model": self.config.model.path,
            "model_digest": self._model_digest,
            "vocabulary": self.policies.vocabulary,
            "max_context": self.config.model.max_context,
        }

    def status(self) -> dict[str, Any]:
        """Return the node's whole state as plain data, for /metrics and ``rollout-server status``."""
        open_runs = [run for run in self._runs.values() if run.end is None]
        progress = [run.collector.progress() for run in open_runs]
        return {
            **self.health(),
            "running": sum(item.running for item in progress),
            "waiting": sum(item.waiting for item in progress),
            "open_collections": len(open_runs),
            "policy_versions": self.policies.versions(),
            "policy_users": self.policies.users(),
            "environment": asdict(self.pool.status()),
            "router": asdict(self.router.counters),
            "servers": self.servers.status(),
            "collections": self.collections()[-MAX_SHOWN_COLLECTIONS:],
        }

    def collections(self) -> list[dict[str, Any]]:
        """Return the facts of each collection that is open or ended recently, in the order of opening."""
        return [run.facts() for run in self._runs.values()]

    def tasks(self, split: str) -> list[str]:
        try:
            return self.pool.tasks(split)
        except UnknownTask as error:
            raise RequestError(404, str(error)) from error

    async def start_collection(self, request: CollectionRequest) -> CollectionRun:
        """Open the collection, or resume the collection with this id. Equal requests give the same collection.

        Raises:
            RequestError: 409 if the id belongs to another request, 400 if the request cannot be collected, 507
                if the disk is full.
        """
        async with self._opening:
            run = self._runs.get(request.id)
            known = run.request if run is not None else await self._stored_request(request.id)
            if known is not None and known != request:
                name = f"collection {request.id!r}"
                raise RequestError(409, f"{name} was started with another request; choose another id")
            if run is not None and run.state not in RETRIED_ENDS:
                return run
            unwritten = ([], []) if run is None else (run.unwritten, run.unheld)
            return await self._open(request, unwritten, retry=True)

    async def collection(self, collection_id: str) -> CollectionRun:
        """Return the collection with this id. A collection that a restart interrupted is resumed.

        Raises:
            RequestError: 404 if there is no such collection.
        """
        async with self._opening:
            if collection_id in self._runs:
                return self._runs[collection_id]
            request = await self._stored_request(collection_id)
            if request is None:
                raise RequestError(404, f"no collection {collection_id[:128]!r}; start it with POST /v1/collections")
            return await self._open(request, ([], []), retry=False)

    async def _stored_request(self, collection_id: str) -> CollectionRequest | None:
        """Return the request of the collection on disk with this id; None if there is no such collection."""
        if not is_collection_id(collection_id):
            return None
        if not await beside(StoredCollection.exists, self._folder, collection_id):
            return None
        stored = await beside(StoredCollection, self._folder, collection_id)
        return None if stored.request is None else CollectionRequest.from_dict(stored.request)

    @property
    def _folder(self) -> Path:
        return self.root / COLLECTIONS

    async def _open(
        self, request: CollectionRequest, unwritten: tuple[list[str], list[str]], retry: bool
    ) -> CollectionRun:
        """Read a collection's files, write the lines (rollouts, held episodes) that an earlier full disk refused, and
        go on with missing rollouts. ``retry`` also resumes a failed or cancelled collection."""

        def load() -> StoredCollection:
            stored = StoredCollection(self._folder, request.id)
            for lines, write in zip(unwritten, (stored.rollouts.append, stored.hold), strict=True):
                if lines:
                    write(lines)
                    lines.clear()
                    stored = StoredCollection(self._folder, request.id)
            return stored

        def idle() -> None:
            if model is not None:
                self.policies.release(request.policy_version)

        model: str | None = None
        try:
            stored = await beside(load)
            if stored.end is None or (retry and stored.end.reason in RETRIED_ENDS):
                model = self._check(request)
                await beside(stored.begin, request)
        except OSError as error:
            if model is not None:
                self.policies.release(request.policy_version)
            raise RequestError(507, f"cannot write to {self._folder}: {error.strerror or error}") from error
        run = CollectionRun(request, stored, self._services, self._attempt, model, self._pump, idle, end=stored.end)
        self._forget_ended()
        self._runs[request.id] = run
        self._pump()
        return run

    def _forget_ended(self) -> None:
        """Keep only the newest ended collections in memory: the others are on disk, and some requests are large."""
        ended = [name for name, run in self._runs.items() if run.idle and not (run.unwritten or run.unheld)]
        for name in ended[:-MAX_ENDED_COLLECTIONS]:
            del self._runs[name]

    def _check(self, request: CollectionRequest) -> str | None:
        """Refuse a request that cannot be collected. In mode "pinned", acquire the version and return its name."""
        if sum(run.end is None for run in self._runs.values()) >= MAX_OPEN_COLLECTIONS:
            raise RequestError(429, f"{MAX_OPEN_COLLECTIONS} collections are open; end some (rollout-server cancel)")
        longest = self.config.model.max_context
        if request.limits.max_context > longest:
            raise RequestError(400, f"limits.max_context {request.limits.max_context} is above the servers' {longest}")
        if isinstance(self.pool, ProgramPool) and request.limits.compaction is not None:
            raise RequestError(400, "limits.compaction must be null: a program of yours shortens its history itself")
        for branch in request.branches:
            self._check_branch(branch)
        try:
            if parse_collection_id(request.id).score is None:
                refuse_shared_grade(self.pool.dataset)
            self.pool.check_tasks([*request.tasks, *(branch.task_id for branch in request.branches)])
            if request.policy_mode == "pinned":
                return self.policies.acquire(request.policy_version)
            self.policies.latest()
            return None
        except (ValueError, UnknownPolicy) as error:
            raise RequestError(400, str(error)) from error

    def _check_branch(self, branch: Branch) -> None:
        """Refuse a branch from a rollout with another world or tokenizer, since no replay can restore that."""
        if isinstance(self.pool, ProgramPool):
            raise RequestError(400, "a program's episodes cannot be continued: the program would have to be replayed")
        if branch.dataset != self.pool.dataset:
            raise RequestError(400, f"{branch.rollout_id} is of dataset {branch.dataset}, not {self.pool.dataset}")
        longer = self.tokens.overfill((message.content for message in branch.opening), len(branch.token_ids))
        opening = [] if longer else self.tokens.prompt(branch.opening)
        if longer or branch.token_ids[: len(opening)] != opening:
            reason = "its first token_ids are not its opening in this model's tokenizer"
            raise RequestError(400, f"{branch.rollout_id} cannot be continued here: {reason}")

    def _attempt(
        self, key: EpisodeKey, draw: int, request: CollectionRequest, model: str | None, start: BranchStart | None
    ) -> Attempt:
        """Return an attempt that suits the environment: one in the node's own loop, or one of a program."""
        if isinstance(self.pool, ProgramPool) and self.endpoint is not None:
            return self.endpoint.attempt(key, draw, request, model)
        policy_client = SamplingClient(request, model, self._services, start)
        return Episode(key, draw, request, self.pool, policy_client, self.metrics.phase, start)

    async def take_episode(self, task_id: str | None, wait_s: float) -> Offer | None:
        """Return the oldest episode that waits for an outside program; None if no episode comes in time."""
        if not (isinstance(self.pool, ProgramPool) and self.pool.runs_elsewhere):
            raise RequestError(
                409, "no episode waits for a program elsewhere: that needs environment harness, no command"
            )
        return await self.pool.take(task_id, wait_s)

    def _pump(self) -> None:
        """Launch waiting episodes while fewer run than may run at once."""
        if self.stopping.is_set() or self.servers.resting:
            return
        free = self.config.max_concurrent_episodes - sum(run.episodes_running for run in self._runs.values())
        for run in self._runs.values():
            while free > 0 and (key := run.collector.start_next()) is not None:
                run.launch(key)
                free -= 1

    def listens_at(self, url: str) -> None:
        """Note the node's address for agents; a configured ``public_url`` has priority over it."""
        if self.endpoint is not None:
            self.endpoint.sessions.base_url = f"{(self.config.public_url or url).rstrip('/')}/v1"

    def write_address(self, url: str, pid: int) -> None:
        """Write the node's address to ``<root>/node.json``, for the process that started the node on port 0."""
        write_whole(self.root / NODE_ADDRESS, json.dumps({"url": url, "pid": pid}))

    def remove_address(self) -> None:
        for name in (NODE_ADDRESS, NODE_SECRET):
            (self.root / name).unlink(missing_ok=True)
