"""The chat APIs that clients speak, a file each: a dialect reads a call, and writes its answer or its refusal.

A dialect is imported when its route is first asked for. Installed packages add routes by entry points of the group
``torchtune_loop.dialects``, each a :class:`Route` or several.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

from loop_plumbing.plug_ins import load, plug_ins

if TYPE_CHECKING:
    from rollout_server.endpoint.dialects.dialect import Dialect


@dataclass(frozen=True)
class Route:
    """A route of a dialect, that is, of a chat API.

    Args:
        path: the path of a call, with aiohttp's patterns. The pattern ``model`` stands for the name of a model.
        target: ``module:Class`` that implements the dialect.
        counts: the path that counts the tokens of the same call without sampling, if the dialect has such a path.
        header: a header that only clients of this dialect send.
    """

    path: str
    target: str
    counts: str | None = None
    header: str | None = None

    @cached_property
    def dialect(self) -> Dialect:
        """The dialect, imported now."""
        return load(self.target)()


CHAT = Route("/v1/chat/completions", "rollout_server.endpoint.dialects.chat:ChatDialect")
RESPONSES = Route("/v1/responses", "rollout_server.endpoint.dialects.responses:Responses")
ANTHROPIC = Route(
    "/v1/messages",
    "rollout_server.endpoint.dialects.anthropic:Anthropic",
    counts="/v1/messages/count_tokens",
    header="anthropic-version",
)
COMPLETIONS = Route("/v1/completions", "rollout_server.endpoint.dialects.completions:Completions")


@cache
def routes() -> tuple[Route, ...]:
    """Return the project's own routes, and those that installed packages add.

    Raises:
        ImportError, AttributeError: an entry point leads nowhere.
    """
    added: list[Route] = []
    for target in plug_ins("dialects").values():
        loaded: Route | Iterable[Route] = load(target)
        added += [loaded] if isinstance(loaded, Route) else loaded
    return (CHAT, RESPONSES, ANTHROPIC, COMPLETIONS, *added)
