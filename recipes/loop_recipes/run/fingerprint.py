"""The fingerprint of a run, beside its config: digests of its base model and first adapter, its tasks and their grader.

The digests are in every checkpoint. Without them, a run could silently go on with other files of the same names: its
adapters would train on weights that they do not fit, and one curve would hold the rewards of two graders.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtune import utils

from agent_environments.description import Description
from loop_formats.run_files import adapter_digest
from loop_formats.schema import ConfigError
from model_families.base_model import model_digest

log = utils.get_logger("INFO")


def model_identity(base_model: str, initial_adapter: str | None) -> dict[str, str]:
    """Return digests of the base model in its folder, and of the adapter that the run began with, if there is one.

    Raises:
        ConfigError: a file cannot be read.
    """
    try:
        digests = {"base model": model_digest(base_model)}
        if initial_adapter is not None:
            digests["initial adapter"] = adapter_digest(Path(initial_adapter))
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
    return digests


def environment_identity(dataset: str, environment: Description) -> dict[str, str]:
    """Return the name of the dataset, and the environment's identity, on which the grades depend."""
    return {"dataset": dataset, **environment.whole_identity}


def compare(state: Mapping[str, Any], what: str, now: Mapping[str, str], accept: bool) -> None:
    """Compare the run's fingerprint with its checkpoint's, and log accepted changes.

    Args:
        state: the checkpoint that the run goes on from; one without a fingerprint is not compared.
        what: the part whose digests ``now`` holds: "model" or "environment".
        accept: the config's ``accept_changes``.

    Raises:
        ConfigError: something has changed, and that is not accepted.
    """
    before = state.get("fingerprint", {}).get(what)
    if before is None or not (changed := differing(before, now)):
        return
    names = ", ".join(changed)
    if not accept:
        raise ConfigError(
            f"resume_from_checkpoint: the run's fingerprint has changed since its checkpoint: {names}; "
            "bring it back as it was, begin in another output_dir, or go on knowingly with accept_changes=True"
        )
    utils.log_rank_zero(log, f"going on though these have changed since the checkpoint: {names}")


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names for which the two mappings have different values, or only one has a value."""
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]
