"""The lines of ``rollout-server status``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from loop_plumbing.sanitize import sanitize


def status_lines(url: str, status: dict[str, Any]) -> Iterator[str]:
    """Yield lines on a node's state: its model and policies, its servers, its last collections. An id is whole, since
    another command takes it."""
    yield f"{url}: {status['status']}"
    if status["status"] == "ok":
        versions = ", ".join(f"{version} ({count} using it)" for version, count in status["policy_users"].items())
        yield f"model {status['model']}, dataset {status['dataset']}, policy versions {versions or 'none'}"
    for item in status["servers"]:
        error = f", last error: {sanitize(item['last_error'].splitlines()[0])}" if item["last_error"] else ""
        load = f"{item['running']:g} running, {item['waiting']:g} waiting, KV use {item['kv_usage']:.0%}"
        yield f"{item['name']} {item['url']}: {item['state']}, {load}, {item['restarts']} restarts{error}"
    for item in status["collections"]:
        counts = [f"{item[key]} {key}" for key in ("running", "waiting", "dropped", "failed", "lost") if item[key]]
        done = f"{item['finished']} of {item['needed']} finished"
        yield f"{item['id']}: {', '.join([item['state'], done, *counts])}"
