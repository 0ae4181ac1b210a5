"""Made-up records of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loop_formats.rollout import Rollout, Turn


def turn(start: int, end: int, version: int = 0, message: int = 0, **changes: Any) -> Turn:
    """A turn of the tokens ``[start, end)``."""
    return Turn(start, end, version, "stop", "server", 0.1, 0.1, message, **changes)


def rollout(token_ids: Sequence[int], turns: Sequence[Turn], **changes: Any) -> Rollout:
    """The rollout ``c/t_1/0.0`` of these tokens; ``changes`` replace fields. It is not validated.

    The mask follows from the turns, and the name from ``collection_id``, ``task_id`` and ``index``.
    """
    mask = [any(turn.start <= place < turn.end for turn in turns) for place in range(len(token_ids))]
    values = {
        **{"collection_id": "c", "task_id": "t_1", "index": 0, "attempt": 0, "seed": 1, "dataset": "made-up"},
        **{"token_ids": [*token_ids], "mask": mask, "sampler_logprobs": [-0.5 if sampled else 0.0 for sampled in mask]},
        **{"turns": [*turns], "messages": [], "requirements": [], "reward": 0.5, "success": False},
        **{"end_reason": "completed", "temperature": 1.0, "started_at": 0.0, "seconds": 1.0},
        **changes,
    }
    name = "{collection_id}/{task_id}/{index}.0".format(**values)
    return Rollout(**{"rollout_id": name, **values})
