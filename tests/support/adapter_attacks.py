"""Agent code that attacks, from ``adapter_attacks.yaml``, whose head says what is filled in."""

from __future__ import annotations

from pathlib import Path

import yaml

CHANNEL = "channel = [o for o in __import__('gc').get_objects() if type(o).__name__ == 'Channel'][0]\n"
_GROUPS: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
VOIDING = {name: code.replace("CHANNEL\n", CHANNEL) for name, code in _GROUPS.pop("voiding").items()}
"""Each makes, or is meant to make, something else than the agent's code fail. Works with the engine's guard on."""
HANGS = _GROUPS["hangs"]
ATTACKS = {name: code for group in _GROUPS.values() for name, code in group.items()}
