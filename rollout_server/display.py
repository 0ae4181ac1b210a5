"""The node's state for people: a live line in a terminal, and the table of ``rollout-server status``."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rollout_server.node import Node


async def draw_status(node: Node, terminal: Console) -> None:
    """Draw a status line at the bottom of the terminal, log lines above it, until it is cancelled."""
    counted, then = 0.0, time.monotonic()
    with Live(console=terminal, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(1.0)
            sampled, now = node.router.counters.sampled_tokens, time.monotonic()
            live.update(status_line(node.status(), (sampled - counted) / (now - then)), refresh=True)
            counted, then = sampled, now


def status_line(status: dict[str, Any], tokens_per_second: float) -> Text:
    """Return a line on a :meth:`Node.status <rollout_server.node.Node.status>`."""
    ready = sum(server["state"] == "ready" for server in status["servers"])
    versions = status["policy_versions"]
    parts = [
        f"servers {ready}/{len(status['servers'])}",
        f"policy {versions[-1] if versions else 'none'}",
        f"episodes {status['running']} running, {status['waiting']} waiting",
        f"{tokens_per_second:.0f} tok/s",
    ]
    current = [item for item in status["collections"] if item["state"] == "running"]
    if current:
        parts.append(f"{current[0]['id']}: {current[0]['finished']}/{current[0]['needed']}")
    parts += status.get("waits_for", [])
    color = "green" if status["status"] == "ok" and ready == len(status["servers"]) else "yellow"
    return Text.assemble((f"● {status['status']}", color), "  " + " · ".join(parts))


def status_tables(url: str, status: dict[str, Any]) -> Group:
    """Return tables of a node's state: its model and policies, its servers, its last collections."""
    head = Text(f"{url}: {status['status']}")
    if status["status"] == "ok":
        versions = ", ".join(f"{version} ({count} using it)" for version, count in status["policy_users"].items())
        head.append(f"\nmodel {status['model']}, dataset {status['dataset']}, policy versions {versions or 'none'}")
    servers = Table("server", "state", "running", "waiting", "KV use", "restarts", "last error", title="Servers")
    for item in status["servers"]:
        servers.add_row(
            f"{item['name']} {item['url']}",
            item["state"],
            f"{item['running']:g}",
            f"{item['waiting']:g}",
            f"{item['kv_usage']:.0%}",
            str(item["restarts"]),
            (item["last_error"] or "").splitlines()[0] if item["last_error"] else "",
        )
    columns = ("id", "state", "finished", "needed", "running", "waiting", "dropped", "failed", "lost")
    collections = Table(*columns, title="Collections")
    for item in status["collections"]:
        collections.add_row(*(str(item[column]) for column in columns))
    return Group(head, servers, collections)
