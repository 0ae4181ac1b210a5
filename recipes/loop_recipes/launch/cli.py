"""``loop-launch``: the rollout node that belongs to a training config, and a look at a job before it is queued.

loop-launch rollout-node --config loop_appworld/qwen2_5_32b output_dir=runs/a -- host=0.0.0.0 port=8700
loop-launch check --config loop_appworld/qwen2_5_32b output_dir=runs/a --nodes 2 --gpus 8 --gpu-gib 79
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from loop_formats.run_files import whole_file
from loop_formats.schema import ConfigError, from_mapping, made_folder, require
from loop_recipes.config.files import compose, split_words
from rollout_server.config import NodeConfig, write_node_config


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit status 0, or 1 with one line on stderr per thing that is wrong."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    words, node_overrides = split_words(words)
    parser = argparse.ArgumentParser(
        "loop-launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in (
        ("rollout-node", "run the rollout node of a training config"),
        ("check", "show what would run where, and whether it fits, without running it"),
    ):
        command = commands.add_parser(name, help=summary)
        command.add_argument("--config", required=True, help="a name from `tune ls`, or a YAML file")
        command.add_argument(
            "overrides",
            nargs="*",
            metavar="key=value",
            help="values that replace those of the YAML; ~key leaves one out",
        )
        if name == "check":
            command.add_argument("--nodes", type=int, default=2, help="1: rollouts and trainer share a node, half each")
            command.add_argument("--gpus", type=int, default=8, help="GPUs of each node")
            command.add_argument("--gpu-gib", type=float, default=79.0, help="memory of one GPU in GiB")
    options = parser.parse_args(words)
    try:
        config = compose(options.config, options.overrides)
        if options.command == "rollout-node":
            _run_node(config, node_overrides)
        else:
            _check(config, options.nodes, options.gpus, options.gpu_gib)
    except (ConfigError, OSError) as error:
        sys.exit(f"loop-launch: {error}")
    except OmegaConfBaseException as error:
        sys.exit(f"loop-launch: config {options.config}: {str(error).splitlines()[0]}")


def _node_config(config: DictConfig) -> NodeConfig:
    try:
        plain = OmegaConf.select(config, "rollout_node.config")
        if OmegaConf.is_config(plain):
            plain = OmegaConf.to_container(plain, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"rollout_node.config: {str(error).splitlines()[0]}") from error
    if not plain:
        raise ConfigError("the config has no rollout_node.config: say there what the rollout node serves")
    return from_mapping(NodeConfig, plain, "rollout_node.config")


def _run_node(config: DictConfig, overrides: list[str]) -> None:
    """Write the node's YAML into the run's folder and become ``rollout-server``."""
    node = _node_config(config)
    output_dir = config.get("output_dir")
    require(isinstance(output_dir, str), f"output_dir must be str, not {output_dir!r}")
    file = made_folder("output_dir", Path(output_dir).resolve()) / "rollout_node.yaml"
    # Several nodes of one job write the same file; none may read half of it.
    with whole_file(file) as partial:
        write_node_config(node, partial)
    command = [sys.executable, "-m", "rollout_server.cli", "--config", str(file), *overrides]
    os.execv(sys.executable, command)


def _check(config: DictConfig, nodes: int, gpus: int, gpu_gib: float) -> None:
    """Print what would run where and the memory arithmetic; exit 1 when something cannot work."""
    node = _node_config(config)
    from loop_recipes.launch.job_check import Machines, check_job  # imports the components, and torch with them

    report = check_job(config, node, Machines(nodes, gpus, gpu_gib))
    print("\n".join(report.lines))
    for problem in report.problems:
        print(f"problem: {problem}", file=sys.stderr)
    if report.problems:
        sys.exit(1)
    print("nothing found that would stop this job")


if __name__ == "__main__":
    main()
