"""The calls of a session: their number at once, the answers for retries, and their end."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollout_server.endpoint.wire import RETRY_AFTER_S, Answer, ApiError, episode_over

MAX_CALLS_AT_ONCE = 32
MAX_BYTES_BEING_READ = 32 << 20
READ_AT_ONCE = 20_000
"""Bytes of a request up to which it is read, and its prompt encoded, in the event loop; more would hold up others."""
READERS = ThreadPoolExecutor(2, "request")
"""The threads for larger requests: apart from all others, so that no agent keeps the logs or a world waiting."""
MAX_REMEMBERED_REFUSALS = 1024
T = TypeVar("T")


@dataclass
class Call:
    """A call, its ``answer``, and the waiting clients. ``heard`` says that one client got the whole answer."""

    answer: asyncio.Task[Answer]
    listeners: list[Callable[[], bool]] = field(default_factory=list)
    heard: bool = False

    @property
    def lost(self) -> bool:
        """True if no client has got the answer or waits for it."""
        return not self.heard and not any(listens() for listens in self.listeners)


class Calls:
    """All calls and steps that use one key.

    Args:
        keep_answers: keep all answers until the end, as for an episode. Else keep only the latest that reached nobody.

    Attributes:
        requests: the number of requests that are being read.
        repeated: the number of calls that got the answer of an earlier call.
    """

    def __init__(self, keep_answers: bool):
        self.requests = 0
        self._bytes = 0
        self.repeated = 0
        self._keep_answers = keep_answers
        self.made: dict[str, Call] = {}
        """The calls that a retry would find, by identity."""
        self._refused: Counter[str] = Counter()
        """Calls that were refused before they began, by identity: there is no answer for a retry."""
        self._large = asyncio.Lock()
        self._under_way: set[asyncio.Task[Any]] = set()

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    @property
    def refused(self) -> int:
        """The number of refused calls that are remembered."""
        return self._refused.total()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Callable[[int], None]]:
        """Count a request until its body has been read as a call. Yield a function that counts the body's bytes.

        Raises:
            ApiError: too many requests or bytes are being read; the yielded function raises this, too.
        """
        own = 0

        def arrived(size: int) -> None:
            nonlocal own
            own += size
            self._bytes += size
            if self._bytes > MAX_BYTES_BEING_READ:
                message = f"requests of more than {MAX_BYTES_BEING_READ} bytes are being read"
                raise ApiError(429, "too_many_calls", message, RETRY_AFTER_S)

        if self.requests >= MAX_CALLS_AT_ONCE:
            raise ApiError(429, "too_many_calls", f"{MAX_CALLS_AT_ONCE} requests are being read", RETRY_AFTER_S)
        self.requests += 1
        try:
            yield arrived
        finally:
            self.requests -= 1
            self._bytes -= own

    async def beside(self, size: int, work: Callable[[], T]) -> T:
        """Return ``work()``, which reads ``size`` bytes. Large work runs outside the event loop, one at a time for each
        session: other keys' requests then wait for at most one request of this key."""
        if size <= READ_AT_ONCE:
            return work()
        async with self._large:
            return await asyncio.get_running_loop().run_in_executor(READERS, work)

    async def answered(
        self, identity: str, retried: bool, listens: Callable[[], bool], work: Callable[[], Coroutine[Any, Any, Answer]]
    ) -> Answer:
        """Return the answer of a call. ``work`` computes the answer, unless an earlier call has it.

        A repeated call gets the earlier answer if that reached nobody, or if the call is marked as a retry. Any other
        repeated request gets a new sample.

        Args:
            identity: the same for a call and its retries.
            retried: the client marks the call as a retry.
            listens: returns whether the client is still connected.

        Raises:
            ApiError: the refusal that is to be sent to the client.
        """
        call = self.made.get(identity)
        if retried and self._refused[identity]:
            self._refused -= Counter([identity])  # keeps what is above 0
            call = None
        if call is None or not (retried or call.lost):
            try:
                call = self.made[identity] = Call(self.begin(work()))
            except ApiError:
                self._refused[identity] += 1
                if len(self._refused) > MAX_REMEMBERED_REFUSALS:
                    del self._refused[next(iter(self._refused))]
                raise
        else:
            self.repeated += 1
        if not self._keep_answers:
            self._forget_lost()
        call.listeners.append(listens)
        try:
            return await self.outcome(call.answer)
        except Exception:
            if self.made.get(identity) is call:
                del self.made[identity]
            raise

    def _forget_lost(self) -> None:
        """Forget answers that reached nobody, but keep the latest for retries. A key may live for days."""
        answered = [identity for identity, call in self.made.items() if call.answer.done()]
        for identity in answered[:-MAX_CALLS_AT_ONCE]:
            del self.made[identity]

    def heard(self, identity: str) -> None:
        """Note that the client got the whole answer."""
        if identity in self.made:
            self.made[identity].heard = True
            self.made[identity].listeners.clear()  # each holds its request, and so its body
            if not self._keep_answers:
                del self.made[identity]

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a call or a step in a task of its own, which :meth:`close` ends.

        Raises:
            ApiError: too many calls and steps are under way.
        """
        if len(self._under_way) >= MAX_CALLS_AT_ONCE:
            work.close()
            raise ApiError(429, "too_many_calls", f"{MAX_CALLS_AT_ONCE} calls are under way", RETRY_AFTER_S)
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def outcome(self, work: asyncio.Task[T]) -> T:
        """Return the result of ``work``, which goes on even if the client disconnects."""
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():
                raise episode_over("the episode is over") from None
            raise

    async def all_ended(self) -> None:
        """Return once no call or step is under way."""
        while self._under_way:
            await asyncio.wait(list(self._under_way))

    async def close(self) -> None:
        """End the calls and steps that are under way."""
        work = list(self._under_way)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
