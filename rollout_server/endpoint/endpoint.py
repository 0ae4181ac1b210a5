"""The node's services for agents of your own: sessions by their keys, and keys of no episode."""

from __future__ import annotations

from loop_formats.collection_request import CollectionRequest
from rollout_server.collecting.collector import EpisodeKey
from rollout_server.collecting.policy_sampler import EpisodeServices
from rollout_server.endpoint.harness_episode import HarnessEpisode
from rollout_server.endpoint.serving import Serving
from rollout_server.endpoint.sessions import Sessions


class Endpoint:
    """The recording endpoint of a node.

    Attributes:
        sessions: the sessions of the episodes that programs play, by their keys.
        serving: opens and closes keys of no episode.
    """

    def __init__(self, services: EpisodeServices, max_context: int) -> None:
        self._services = services
        self.sessions = Sessions()
        self.serving = Serving(self.sessions, services, max_context)

    def attempt(self, key: EpisodeKey, draw: int, request: CollectionRequest, model: str | None) -> HarnessEpisode:
        """Return an attempt of a program at an episode; ``model`` is the policy's name, None for the newest."""
        return HarnessEpisode(key, draw, request, model, self._services, self.sessions)
