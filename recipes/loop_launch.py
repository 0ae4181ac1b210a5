"""``loop-launch``: the rollout node that belongs to a training config, and a look at a job before it is queued.

loop-launch rollout-node --config loop_appworld/qwen2_5_32b output_dir=runs/a -- host=0.0.0.0 port=8700
loop-launch check --config loop_appworld/qwen2_5_32b output_dir=runs/a --gpus 8 --gpu-gib 80
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import loop_recipes.paths  # noqa: F401 - registers the resolvers that configs use
from loop_recipes.config_extends import config_file, extended
from loop_recipes.memory_plan import ModelShape, plan_rollout_server, plan_trainer
from rollout_server.config import ConfigError, NodeConfig, from_mapping


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit status 0, or 1 with one line on stderr per thing that is wrong."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    words, node_overrides = _split(words)
    parser = argparse.ArgumentParser("loop-launch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in (
        ("rollout-node", "run the rollout node of a training config"),
        ("check", "show what would run where, and whether it fits, without running it"),
    ):
        command = commands.add_parser(name, help=summary)
        command.add_argument("--config", required=True, help="a name from `tune ls`, or a YAML file")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace those of the YAML")
        if name == "check":
            command.add_argument("--gpus", type=int, default=8, help="GPUs of each node")
            command.add_argument("--gpu-gib", type=float, default=79.0, help="memory of one GPU in GiB")
    options = parser.parse_args(words)
    try:
        config = compose(options.config, options.overrides)
        if options.command == "rollout-node":
            _run_node(config, node_overrides)
        else:
            _check(config, options.gpus, options.gpu_gib)
    except (ConfigError, OSError) as error:
        sys.exit(f"loop-launch: {error}")


def compose(name: str, overrides: Sequence[str]) -> DictConfig:
    """The config that ``tune run loop_appworld --config name overrides...`` would run with.

    Raises:
        ConfigError: no such config, or an override that is not ``key=value``.
    """
    for word in overrides:
        if "=" not in word:
            raise ConfigError(f"{word!r} is not key=value")
    try:
        return extended(OmegaConf.merge(OmegaConf.load(config_file(name)), OmegaConf.from_dotlist(list(overrides))))
    except OmegaConfBaseException as error:
        raise ConfigError(f"config {name}: {str(error).splitlines()[0]}") from error


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _node_section(config: DictConfig) -> dict[str, Any]:
    section = OmegaConf.select(config, "rollout_node.config")
    if not section:
        raise ConfigError("the config has no rollout_node.config: say there what the rollout node serves")
    try:
        plain = OmegaConf.to_container(section, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"rollout_node.config: {str(error).splitlines()[0]}") from error
    from_mapping(NodeConfig, plain, "rollout_node.config")
    return plain


def _run_node(config: DictConfig, overrides: list[str]) -> None:
    """Write the node's YAML into the run's folder and become ``rollout-server``."""
    plain = _node_section(config)
    file = Path(config.output_dir).resolve() / "rollout_node.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(plain), file)
    command = [sys.executable, "-m", "rollout_server.cli", "--config", str(file), *overrides]
    os.execv(sys.executable, command)


def _check(config: DictConfig, gpus: int, gpu_gib: float) -> None:
    """Print where things would run and the memory arithmetic; exit 1 when something cannot work."""
    plain = _node_section(config)
    node = from_mapping(NodeConfig, plain, "rollout_node.config")
    problems: list[str] = []
    for path, what in ((node.model.path, "model"), (plain["environment"]["config"].get("root"), "dataset")):
        if path and not Path(path).exists():
            problems.append(f"{what}: {path} does not exist on this machine")
    model_file = Path(node.model.path) / "config.json"
    servers = len(node.servers.urls or []) or node.servers.count
    needed = node.servers.tensor_parallel_size * node.servers.count
    print(f"rollout node   {servers} vLLM server(s) x {node.servers.tensor_parallel_size} GPU(s), port {node.port}")
    print(
        f"trainer        {gpus} rank(s), {config.get('dtype', 'fp32')}, output in {Path(config.output_dir).resolve()}"
    )
    if node.servers.urls is None and config.get("device", "cpu") == "cuda" and needed > gpus:
        problems.append(
            f"the servers need {needed} GPUs, a node has {gpus}: lower servers.count or tensor_parallel_size"
        )
    if model_file.is_file() and config.get("device", "cpu") == "cuda":
        shape = ModelShape.from_config(json.loads(model_file.read_text()), config.model.get("lora_rank", 16))
        for plan in (
            plan_trainer(shape, config.collection.limits.max_context, gpus, gpu_gib),
            plan_rollout_server(shape, node, gpu_gib),
        ):
            print(plan.table())
            if plan.over:
                problems.append(plan.over)
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    if problems:
        sys.exit(1)
    print("nothing found that would stop this job")


if __name__ == "__main__":
    main()
