"""The tables of ``rollout-server status``."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text


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
