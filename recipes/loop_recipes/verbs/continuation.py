"""Asks the rollout node of a live run to continue a rollout from a turn in the viewer."""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

from loop_formats.branch import Branch
from loop_formats.rollout import Rollout
from loop_formats.run_files import meta_path, node_address, read_lines
from loop_plumbing.secret import read_secret
from loop_recipes.config.rollout_node import RolloutNodeConfig
from loop_recipes.rollouts.branching import HowToSample, continuation_request, stored_protocol
from loop_viewer.app import CannotContinue
from rollout_server.asking import node_secret
from rollout_server.client import NodeUnreachable, RolloutClient, RolloutNodeError

TOKEN_ENV = RolloutNodeConfig.token_env
PATIENCE_S = 5.0


def continue_rollout(log: Path, line: bytes, turn: int) -> str:
    """Let the node that wrote ``log`` play one continuation of a rollout, with the node's newest policy version.

    Args:
        log: a file in the folder of the node's collections.
        line: the rollout's line in ``log``.
        turn: the turn of its episode, from 0.

    Returns:
        The id of the collection that will hold the new rollout.

    Raises:
        CannotContinue: no node is running there, or it does not take the branch.
    """
    try:
        client = _client(log)
        branch = Branch.of(Rollout.from_dict(json.loads(line)), [turn])
        sampling, limits = stored_protocol(log)
        versions = client.health().get("policy_versions") or []
        if not versions:
            raise CannotContinue("the rollout node serves no policy yet; try again when it does")
        limits = replace(limits, compaction=None)  # the new rollout ends where its context does
        # Each call starts another collection, because its seed differs.
        how = HowToSample(1, versions[-1], sampling, limits, seed=secrets.randbelow(1 << 31))
        request = continuation_request([branch], how)
        client.start_collection(request)
    except RolloutNodeError as error:
        cure = f"; start run and viewer with the same {TOKEN_ENV}" if error.status == 401 else ""
        raise CannotContinue(f"{error}{cure}") from error
    except (NodeUnreachable, ValueError) as error:
        raise CannotContinue(str(error)) from error
    return request.id


def continuation_state(log: Path) -> dict[str, Any]:
    """Return {"ended": false}, or {"ended": true, "error": why there is no rollout, or None}, for a collection.

    Raises:
        CannotContinue: the collection has not ended, and its node is gone.
    """
    meta = meta_path(log.parent, log.stem)
    for line in read_lines(meta) if meta.is_file() else ():
        if end := line.record.get("end"):
            reasons = [
                end["error"],
                *end.get("refused", {}).values(),
                *(lost["message"] for lost in end.get("lost", ())),
            ]
            return {"ended": True, "error": next(filter(None, reasons), None)}
    try:
        _client(log).health()
    except NodeUnreachable as error:
        raise CannotContinue(f"the rollout node is gone before the continuation ended ({error})") from error
    return {"ended": False}


def _client(log: Path) -> RolloutClient:
    """Connect to the node that wrote ``log``; raise CannotContinue if this node is not running."""
    root = log.parent.parent
    url = node_address(root)
    if url is None:
        raise CannotContinue("no rollout node of this run is running on this machine; it runs while the run trains")
    return RolloutClient(url, node_secret(root) or read_secret(TOKEN_ENV), timeout_s=PATIENCE_S, reconnect_s=0.0)
