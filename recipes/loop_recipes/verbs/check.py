"""Computes where a config would run and whether it fits, without running it; or prints the keys of configs.

loop check qwen2_5_32b preset=paper output_dir=runs/a
loop check qwen2_5_7b_one_gpu output_dir=runs/a --gpu-memory 40
loop check tiny_cpu model.path=models/SmolLM3-3B --probe
loop check qwen2_5_7b --pilot runs/pilot
loop check --gpu-memory 24
loop check --keys collection.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from agent_environments.protocol import create_pool, is_harness
from loop_formats.schema import ConfigError
from loop_plumbing.breakage import raised_as
from loop_recipes.config.arguments import config_parser
from loop_recipes.config.files import compose
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.config.rollout_node import described_node
from loop_recipes.paths import config_files
from loop_recipes.terminal import say

KEYS_COLUMNS = 100
"""Width of the sentences of keys, where the terminal is not narrower."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print where everything would run and the memory arithmetic.

    Returns:
        The exit status: 1 when something cannot work, with one line on stderr for each such thing.
    """
    parser = config_parser("check", __doc__, optional=True)
    parser.add_argument("--keys", metavar="PREFIX", nargs="?", const="", help="print the keys that begin with PREFIX")
    usual = "by node.servers.gpus, else"
    parser.add_argument("--nodes", type=int, help=f"1: rollouts and trainer share a node, half each ({usual} 2)")
    parser.add_argument("--gpus", type=int, help=f"GPUs of each node ({usual} 8)")
    text = "memory of one GPU in GiB (79); without CONFIG: list the shipped configs that fit"
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help=text)
    text = "a training run or an evaluation: estimate how many groups of rollouts would have signal"
    parser.add_argument("--pilot", type=Path, metavar="FOLDER", help=text)
    parser.add_argument("--probe", action="store_true", help="read the model and compare its layers with transformers'")
    options = parser.parse_intermixed_args(arguments)
    if options.keys is not None:
        return _print_keys(parser.prog, options.keys)
    if options.config is None and options.gpu_memory is None:
        parser.error("give a config, --gpu-memory or --keys")
    memory = 79.0 if options.gpu_memory is None else options.gpu_memory
    # Where transformers is imported, it warns of kernels that this machine lacks; nothing is computed here.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        if options.config is None:
            from loop_recipes.plan.job_memory import what_fits  # as below

            say(*what_fits(config_files()["machine"], memory))
            return 0
        config = compose(options.config, options.overrides)
        node = described_node(config)
        try:  # reports mistakes in the config itself before torch is loaded
            read_config(config, LoopConfig)
        except ConfigError as error:
            with raised_as(ConfigError, f"{error}\n{parser.prog}: node.environment: ", Exception):
                create_pool(node.environment.name, node.environment.options, lambda text: [])
            raise
        from loop_recipes.plan.job_check import check_job, probe_model  # imports the components, and torch with them
        from loop_recipes.plan.report import Machines, Report, ReportRow, usual_machines
        from loop_recipes.plan.signal_report import forecast, pilot_groups

        nodes, gpus = usual_machines(node.servers)
        nodes = nodes if options.nodes is None else options.nodes
        gpus = gpus if options.gpus is None else options.gpus
        findings = [*check_job(config, node, Machines(nodes, gpus, memory))]
        if options.probe:
            findings.append(probe_model(node.model.path, node.model.max_context))
        if options.pilot is not None:
            groups = pilot_groups(options.pilot)
            findings.append(ReportRow("signal", "; ".join(forecast(groups, config.collection.rollouts_per_task))))
    except (ConfigError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
    report = Report.of(findings)
    say(*report.lines)
    for problem in report.problems:
        say(f"problem: {problem}", stream=sys.stderr)
    if report.problems:
        return 1
    verb = "eval" if is_harness(node.environment.name) else "try"
    note = f", but its environment was not opened: `loop {verb} {options.config}` does so" if report.unopened else ""
    say(f"nothing found that would stop this job{note}")
    return 0


def _print_keys(program: str, prefix: str) -> int:
    from loop_recipes.verbs.keys import key_lines

    try:
        print("\n".join(key_lines(prefix, min(KEYS_COLUMNS, shutil.get_terminal_size((KEYS_COLUMNS, 24)).columns))))
    except ConfigError as error:
        sys.exit(f"{program}: {error}")
    return 0
