"""A rollout node that serves the policy of a training config, for commands that sample outside of a training run."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loop_formats.schema import made_folder, require
from loop_recipes.config.files import compose
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.rollouts.node_source import NodeSource
from loop_recipes.rollouts.open import open_nodes
from loop_recipes.rollouts.plan import run_name
from loop_recipes.rollouts.several_nodes import SeveralNodes

POLICY_VERSION = 0
"""The version under which the policy is served."""


@dataclass(frozen=True)
class NodePolicy:
    """The policy, node and output folder ``out`` of a command that samples. The ids of its collections begin with
    ``name``. ``tasks`` are the ids in ``collection.tasks``, or else the tasks of the training split."""

    conf: LoopConfig
    name: str
    out: Path
    nodes: NodeSource | SeveralNodes
    tasks: list[str]


@contextlib.contextmanager
def served_policy(config: str, overrides: Sequence[str], branching: bool = False) -> Iterator[NodePolicy]:
    """Open the node of a config of ``loop_appworld``, and serve its ``initial_adapter`` or the base model.

    Args:
        branching: whether the command continues stored rollouts from their turns.

    Raises:
        ConfigError: the config is wrong. The node's errors are raised too.
    """
    # the checks of a run, which --help does without
    from loop_recipes.config.preflight import check_adapter_folder, check_rollout_node

    conf = read_config(compose(config, overrides), LoopConfig)
    require(conf.rollout_node.replay is None, "rollout_node.replay: stored rollouts cannot be sampled anew")
    if branching:
        conf.collection.limits.check_branching("collection.limits")
    check_rollout_node(conf)
    check_adapter_folder("initial_adapter", conf.initial_adapter, conf)
    out = Path(conf.output_dir).resolve()
    made_folder("output_dir", out)
    nodes = open_nodes(conf.rollout_node, conf.node, out, conf.collection.deadline_s)
    try:
        nodes.wait_ready()
        with tempfile.TemporaryDirectory() as scratch:
            nodes.publish(POLICY_VERSION, _adapter(conf, Path(scratch)))
        tasks = conf.collection.tasks or nodes.tasks(conf.collection.split)[1]
        yield NodePolicy(conf, run_name(conf, out), out, nodes, tasks)
    finally:
        nodes.close()


def _adapter(conf: LoopConfig, scratch: Path) -> Path:
    if conf.initial_adapter is not None:
        return Path(conf.initial_adapter)
    from loop_recipes.engine.peft_export import write_empty_adapter

    return write_empty_adapter(scratch / "base", conf.base_model)
