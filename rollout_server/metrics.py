"""The node's numbers for Prometheus (``GET /metrics``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_TURN_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_COUNTED = {
    "episodes": ("Episodes that ended", "outcome"),
    "episode_failures": ("Failed attempts", "reason"),
    "ungradable_episodes": ("Episodes that ended in a state which could not be graded",),
    "broken_episodes": ("Episodes in which the environment itself broke",),
    "turns": ("Agent turns",),
    "sampled_tokens": ("Tokens sampled",),
    "dropped_tokens": ("Sampled tokens of aborted episodes",),
    "prompt_tokens": ("Prompt tokens sent",),
    "cached_tokens": ("Prompt tokens found in the prefix cache",),
    "phase_seconds": ("Seconds of all episodes, per phase", "phase"),
}
"""Counters that episodes feed -> their text, and perhaps a label."""
_OF_NODE = (
    (GaugeMetricFamily, "", "running", "Episodes running"),
    (GaugeMetricFamily, "", "waiting", "Episodes that wait for a slot"),
    (GaugeMetricFamily, "", "open_collections", "Collections that have not ended"),
    (GaugeMetricFamily, "environment", "open_worlds", "Worlds open in the environment"),
    (GaugeMetricFamily, "environment", "waiting", "Episodes that wait for a world"),
    (GaugeMetricFamily, "environment", "restarts", "Restarts of the environment's servers"),
    (CounterMetricFamily, "router", "requests", "Requests for tokens"),
    (CounterMetricFamily, "router", "failed_attempts", "Attempts at a request that a server failed"),
    (CounterMetricFamily, "router", "moved_episodes", "Episodes that went on on another server"),
    (CounterMetricFamily, "router", "bad_logprobs", "Answers whose log-probs are not numbers"),
)
"""Values of :meth:`Node.status <rollout_server.node.Node.status>`: kind, section of the status, key, text."""
_OF_SERVERS = (
    (GaugeMetricFamily, "running", "Requests running on a server"),
    (GaugeMetricFamily, "waiting", "Requests waiting on a server"),
    (GaugeMetricFamily, "kv_usage", "Fraction of a server's KV cache in use"),
    (CounterMetricFamily, "restarts", "Restarts of a server"),
    (CounterMetricFamily, "generated_tokens", "Tokens a server sampled since it started"),
    (CounterMetricFamily, "prefix_hits", "Prefix cache hits of a server, tokens"),
    (CounterMetricFamily, "prefix_queries", "Prefix cache queries of a server, tokens"),
    (GaugeMetricFamily, "up", "1 while a server takes requests"),
)


class NodeMetrics:
    """Counters fed by episodes; :meth:`render` adds the node's state at that moment.

    Each node has its own registry, so several can live in one process.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters = {
            name: Counter(f"rollout_{name}", text, labels, registry=self._registry)
            for name, (text, *labels) in _COUNTED.items()
        }
        self._turn_seconds = Histogram(
            "rollout_turn_sampling_seconds", "Sampling time of a turn", buckets=_TURN_BUCKETS, registry=self._registry
        )

    def count(self, counter: str, *labels: str, by: float = 1) -> None:
        """Add to an episode counter, named without the prefix ``rollout_``."""
        of_all = self._counters[counter]
        (of_all.labels(*labels) if labels else of_all).inc(by)

    def turn(self, sampled: int, prompt: int, cached: int, seconds: float) -> None:
        """Count a turn, its tokens and the seconds of its sampling."""
        self.count("turns")
        self.count("sampled_tokens", by=sampled)
        self.count("prompt_tokens", by=prompt)
        self.count("cached_tokens", by=cached)
        self._turn_seconds.observe(seconds)
        self.phase("sampling", seconds)

    def phase(self, name: str, seconds: float) -> None:
        """Add seconds to a phase: sampling, environment, grade, or node (the node's own work between the others)."""
        self.count("phase_seconds", name, by=max(0.0, seconds))

    def watch(self, status: Callable[[], dict[str, Any]]) -> None:
        """Make every scrape include the node's :meth:`~rollout_server.node.Node.status`."""
        self._registry.register(_StatusCollector(status))

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _StatusCollector(Collector):
    def __init__(self, status: Callable[[], dict[str, Any]]):
        self._status = status

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        for kind, section, key, text in _OF_NODE:
            value = status[section][key] if section else status[key]
            yield kind("_".join(filter(None, ["rollout", section, key])), text, value=value)
        for name, value in status["environment"]["details"].items():
            if isinstance(value, float):
                yield GaugeMetricFamily(f"rollout_environment_{name}", "The environment's own figure", value=value)
        losses = CounterMetricFamily("rollout_environment_losses", "Worlds lost, by how", labels=["kind"])
        for how, count in status["environment"]["losses"].items():
            losses.add_metric([how], count)
        yield losses
        versions = status["policy_versions"]
        yield GaugeMetricFamily("rollout_policy_version", "Newest policy version", value=max(versions, default=-1))
        yield GaugeMetricFamily("rollout_policy_versions", "Policy versions served", value=len(versions))
        for kind, key, text in _OF_SERVERS:
            family = kind(f"rollout_server_{key}", text, labels=["server"])
            for server in status["servers"]:
                family.add_metric([server["name"]], {**server, "up": server["state"] == "ready"}[key])
            yield family
