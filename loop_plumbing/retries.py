"""Decides which answers of an HTTP service are worth another try, and after which pause: one rule for every client."""

from __future__ import annotations

from collections.abc import Iterator

LONGEST_PAUSE_S = 60.0

TRANSIENT = frozenset(
    {
        408,  # the body did not arrive in time: the network was slow
        425,  # a proxy will not repeat a request by itself; we may
        429,  # too much is under way; some of it will end
        502,  # a proxy whose server is away,
        503,  # a server that is starting or has nothing free,
        504,  # a proxy whose server is slow
    }
)
"""Statuses that say nothing against the request. Every other one would come again: 500 is a defect and 507 a full disk,
which no repetition mends."""


def pauses(first_s: float) -> Iterator[float]:
    """Yield the seconds to wait before each further try: twice as long each time, up to :data:`LONGEST_PAUSE_S`."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def asked_to_wait(retry_after: str | None, otherwise_s: float) -> float:
    """Return the seconds that a ``Retry-After`` header asks for, at most :data:`LONGEST_PAUSE_S`; ``otherwise_s`` for a
    date, and for 0, because a client must not ask a busy service without a pause."""
    try:
        wanted_s = float(retry_after or otherwise_s)
    except ValueError:
        return otherwise_s
    return min(wanted_s, LONGEST_PAUSE_S) if wanted_s > 0.0 else otherwise_s
