"""The fingerprint of a run, beside its config: digests of its base model and first adapter, its tasks and their grader.

Their digests are in every checkpoint. A run that goes on with others under the same names is another run without a
word of it: adapters are trained for weights that they were never on, and rewards of two graders are in one curve.
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
    """Digests of the base model in its folder, and of the adapter that the run began with, if it names one.

    Raises:
        ConfigError: a file cannot be read.
    """
    try:
        found = {"base model": model_digest(base_model)}
        if initial_adapter is not None:
            found["initial adapter"] = adapter_digest(Path(initial_adapter))
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
    return found


def environment_identity(dataset: str, environment: Description) -> dict[str, str]:
    """The name of the dataset, and what the environment says that its grades rest on."""
    return {"dataset": dataset, **environment.whole_identity}


def compare(state: Mapping[str, Any], what: str, now: Mapping[str, str], accept: bool) -> None:
    """Compare what the run rests on with its checkpoint, and say what has changed if that is accepted.

    Args:
        state: of the checkpoint that the run goes on from; one that does not say what it rested on is not compared.
        what: the part that ``now`` holds digests of: "model" or "environment".
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
            f"resume_from_checkpoint: what the run rests on has changed since its checkpoint: {names}; "
            "bring it back as it was, begin in another output_dir, or go on knowingly with accept_changes=True"
        )
    utils.log_rank_zero(log, f"going on though these have changed since the checkpoint: {names}")


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names under which the two have other values, or only one has one."""
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]
