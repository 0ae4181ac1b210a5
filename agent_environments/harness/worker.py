"""A program elsewhere that plays a node's episodes: take one, play it, state its reward, take the next.

from agent_environments.harness.worker import play_episodes

def play(episode):                       # any agent; its client reads episode.base_url and episode.api_key
    ...
    return {"reward": 0.5, "metrics": {"steps": 3}}

play_episodes("http://node:8700", play)  # the node's secret is in ROLLOUT_SERVER_TOKEN
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import httpx

from loop_plumbing import running_time
from loop_plumbing.secret import read_secret

logger = logging.getLogger(__name__)

WAIT_S = 30.0
"""Seconds that each request lets the node wait for an episode."""
ANSWER_S = 60.0
RECONNECT_S = 300.0
"""Seconds without an answer after which the worker gives up on the node, which may restart meanwhile."""
PAUSE_S = 1.0
TOKEN_VARIABLE = "ROLLOUT_SERVER_TOKEN"


@dataclass(frozen=True)
class AgentEpisode:
    """An episode to play; pass ``base_url`` and ``api_key`` to an OpenAI client.

    ``split`` is None if the node does not know it. ``policy_version`` is None if the newest version samples each turn.
    """

    task_id: str
    split: str | None
    base_url: str
    api_key: str
    episode_id: str
    collection: str
    policy_version: int | None

    def finish(
        self,
        reward: float | None = None,
        rewards: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """End the episode.

        Args:
            reward: a number in [0, 1]; it counts only if the node's environment sets ``accept_reward``.
            rewards: the parts of the reward by name, for the record.
            metrics: other figures by name, for the record.

        Raises:
            httpx.HTTPStatusError: the episode is over already, or a figure is not a number.
        """
        result = {"reward": reward, "rewards": rewards, "metrics": metrics}
        stated = {name: value for name, value in result.items() if value is not None}
        _post(f"{self.base_url}/episode/finish", stated, self.api_key, ANSWER_S)


def take_episode(node_url: str, token: str | None = None, wait_s: float = WAIT_S) -> AgentEpisode | None:
    """Return the oldest waiting episode; None if no episode comes within ``wait_s`` (at most 60 seconds).

    Args:
        token: the node's secret; None reads :data:`TOKEN_VARIABLE`.

    Raises:
        ValueError: the secret is missing.
        httpx.HTTPError: the node cannot be reached, or refuses.
    """
    secret = read_secret(TOKEN_VARIABLE) if token is None else token
    if not secret:
        raise ValueError(f"set {TOKEN_VARIABLE} to the node's secret")
    answer = _post(f"{node_url}/v1/episodes", {"wait_s": wait_s}, secret, wait_s + ANSWER_S)
    if answer.status_code == httpx.codes.NO_CONTENT:
        return None
    answer_fields = answer.json()
    return AgentEpisode(**{field.name: answer_fields[field.name] for field in fields(AgentEpisode)})


def play_episodes(
    node_url: str,
    play: Callable[[AgentEpisode], Mapping[str, Any] | None],
    token: str | None = None,
    until: Callable[[], bool] = lambda: False,
) -> int:
    """Play one episode after the other until ``until()``, asked between episodes, is true. Return how many were played.

    Args:
        play: plays one episode and returns the arguments of :meth:`AgentEpisode.finish`, or None. If it raises, the
            episode ends without a reward, like the episode of an agent that failed.

    Raises:
        ValueError: the secret is missing.
        httpx.HTTPError: the node refuses, or did not answer for :data:`RECONNECT_S`.
    """
    running_time.tick()
    played, heard = 0, running_time.now()
    while not until():
        try:
            episode = take_episode(node_url, token)
        except httpx.HTTPError as error:
            if not _may_pass(error) or running_time.now() - heard > RECONNECT_S:
                raise
            time.sleep(PAUSE_S)
            continue
        heard = running_time.now()
        if episode is None:
            continue
        try:
            worth = play(episode) or {}
        except Exception:
            logger.exception("%s: the agent failed", episode.episode_id)
            worth = {}
        try:
            episode.finish(**worth)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.UNAUTHORIZED:  # of an episode that ended by its deadline
                raise
        except httpx.TransportError as error:
            logger.warning("%s: the node is not told of its end: %s", episode.episode_id, error)
        heard = running_time.now()
        played += 1
    return played


def _may_pass(error: httpx.HTTPError) -> bool:
    """Return whether the node may answer later, because it is not reachable yet or is starting."""
    starting = httpx.codes.SERVICE_UNAVAILABLE
    return not isinstance(error, httpx.HTTPStatusError) or error.response.status_code == starting


def _post(url: str, body: Mapping[str, Any], key: str, timeout_s: float) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(url, json=body, headers=headers, timeout=timeout_s, trust_env=False)  # no proxy has the node
    return answer.raise_for_status()
