"""The node's numbers for Prometheus (``GET /metrics``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_TURN_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class NodeMetrics:
    """Counters fed by episodes; :meth:`render` adds the node's state at that moment.

    Each node has its own registry, so several can live in one process.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self._episodes = Counter("rollout_episodes", "Episodes that ended", ["outcome"], registry=registry)
        self._failures = Counter("rollout_episode_failures", "Failed attempts", ["reason"], registry=registry)
        self._ungradable = Counter(
            "rollout_ungradable_episodes", "Episodes that ended in a state which could not be graded", registry=registry
        )
        self._broken = Counter(
            "rollout_broken_episodes", "Episodes in which the environment itself broke", registry=registry
        )
        self._turns = Counter("rollout_turns", "Agent turns", registry=registry)
        self._sampled = Counter("rollout_sampled_tokens", "Tokens sampled", registry=registry)
        self._dropped = Counter("rollout_dropped_tokens", "Sampled tokens of aborted episodes", registry=registry)
        self._prompt = Counter("rollout_prompt_tokens", "Prompt tokens sent", registry=registry)
        self._cached = Counter("rollout_cached_tokens", "Prompt tokens found in the prefix cache", registry=registry)
        self._phase = Counter(
            "rollout_phase_seconds", "Seconds of all episodes, per phase", ["phase"], registry=registry
        )
        self._turn_seconds = Histogram(
            "rollout_turn_sampling_seconds", "Sampling time of a turn", buckets=_TURN_BUCKETS, registry=registry
        )

    def turn(self, sampled: int, prompt: int, cached: int, seconds: float) -> None:
        self._turns.inc()
        self._sampled.inc(sampled)
        self._prompt.inc(prompt)
        self._cached.inc(cached)
        self._turn_seconds.observe(seconds)
        self.phase("sampling", seconds)

    def phase(self, name: str, seconds: float) -> None:
        """Add seconds to a phase: sampling, environment, grade, or node (the node's own work between the two)."""
        self._phase.labels(name).inc(max(0.0, seconds))

    def finished(self) -> None:
        self._episodes.labels("finished").inc()

    def ungradable(self) -> None:
        self._ungradable.inc()

    def broken(self) -> None:
        self._broken.inc()

    def failed(self, reason: str) -> None:
        self._episodes.labels("failed").inc()
        self._failures.labels(reason).inc()

    def dropped(self, tokens: int) -> None:
        self._episodes.labels("dropped").inc()
        self._dropped.inc(tokens)

    def watch(self, status: Callable[[], dict[str, Any]]) -> None:
        """Have every scrape include the node's :meth:`~rollout_server.node.Node.status`."""
        self._registry.register(_StatusCollector(status))

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _StatusCollector(Collector):
    def __init__(self, status: Callable[[], dict[str, Any]]):
        self._status = status

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        for key, text in (
            ("running", "Episodes running"),
            ("waiting", "Episodes that wait for a slot"),
            ("open_collections", "Collections that have not ended"),
        ):
            yield GaugeMetricFamily(f"rollout_{key}", text, value=status[key])
        for key, text in (
            ("open_worlds", "Worlds open in the environment"),
            ("waiting", "Episodes that wait for a world"),
            ("restarts", "Restarts of the environment's servers"),
        ):
            value = status["environment"][key]
            yield GaugeMetricFamily(f"rollout_environment_{key}", text, value=value)
        losses = CounterMetricFamily("rollout_environment_losses", "Worlds lost, by how", labels=["kind"])
        for kind, count in status["environment"]["losses"].items():
            losses.add_metric([kind], count)
        yield losses
        for key, text in (
            ("requests", "Requests for tokens"),
            ("failed_attempts", "Attempts at a request that a server failed"),
            ("moved_episodes", "Episodes that went on on another server"),
            ("bad_logprobs", "Answers whose log-probs are not numbers"),
        ):
            yield CounterMetricFamily(f"rollout_router_{key}", text, value=status["router"][key])
        versions = status["policy_versions"]
        yield GaugeMetricFamily("rollout_policy_version", "Newest policy version", value=max(versions, default=-1))
        yield GaugeMetricFamily("rollout_policy_versions", "Policy versions served", value=len(versions))
        for metric, key, text in (
            (GaugeMetricFamily, "running", "Requests running on a server"),
            (GaugeMetricFamily, "waiting", "Requests waiting on a server"),
            (GaugeMetricFamily, "kv_usage", "Fraction of a server's KV cache in use"),
            (CounterMetricFamily, "restarts", "Restarts of a server"),
            (CounterMetricFamily, "generated_tokens", "Tokens a server sampled since it started"),
            (CounterMetricFamily, "prefix_hits", "Prefix cache hits of a server, tokens"),
            (CounterMetricFamily, "prefix_queries", "Prefix cache queries of a server, tokens"),
        ):
            family = metric(f"rollout_server_{key}", text, labels=["server"])
            for server in status["servers"]:
                family.add_metric([server["name"]], server[key])
            yield family
        up = GaugeMetricFamily("rollout_server_up", "1 while a server takes requests", labels=["server"])
        for server in status["servers"]:
            up.add_metric([server["name"]], float(server["state"] == "ready"))
        yield up
