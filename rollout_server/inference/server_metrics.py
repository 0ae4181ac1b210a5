"""Reads a vLLM server's load from its /metrics, Prometheus' text."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ADAPTERS = re.compile(r"^vllm:lora_requests_info\{([^}]*)\} ([-+.\deE]+)$", re.MULTILINE)
_SAMPLE = re.compile(r"^vllm:(\w+?)(?:\{[^}]*\})? ([-+.\deE]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Load:
    """The load of a server according to its /metrics: counts of requests or tokens; ``kv_usage`` is a fraction."""

    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0
    generated_tokens: float = 0.0
    prompt_tokens: float = 0.0
    prefix_hits: float = 0.0
    prefix_queries: float = 0.0


_METRIC_OF_FIELD = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "kv_usage": "kv_cache_usage_perc",
    "generated_tokens": "generation_tokens_total",
    "prompt_tokens": "prompt_tokens_total",
    "prefix_hits": "prefix_cache_hits_total",
    "prefix_queries": "prefix_cache_queries_total",
}


def parse_metrics(text: str) -> dict[str, float]:
    """Return the values in a vLLM server's Prometheus text, summed over engines, by name without "vllm:"."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def parse_load(text: str) -> Load:
    """Return the load of a vLLM server from its Prometheus text. Missing metrics count as 0."""
    sums = parse_metrics(text)
    return Load(**{field: sums.get(metric, 0.0) for field, metric in _METRIC_OF_FIELD.items()})


def adapters_at_work(text: str) -> str:
    """Return the comma-separated adapter names of running and waiting requests, from the Prometheus text.

    vLLM keeps a line for each past combination, with the time when it was last true. The newest line counts.
    """
    lines = _ADAPTERS.findall(text)
    return max(lines, key=lambda line: float(line[1]))[0] if lines else ""
