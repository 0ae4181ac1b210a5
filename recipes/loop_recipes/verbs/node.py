"""Runs a rollout node, or talks to a running one.

    loop node qwen2_5_32b output_dir=runs/a -- host=0.0.0.0 port=8700     the node of a training config
    loop node --file runs/a/rollout_node.yaml port=8700                  the node of a YAML
    loop node status runs/a                                              its episodes, servers, policy versions
    loop node cancel http://127.0.0.1:8700 ID                            end a collection

Words before -- change the config; words after it change the node.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from loop_formats.run_files import whole_file
from loop_formats.schema import ConfigError, made_folder, require
from loop_recipes.config.arguments import verb_parser
from loop_recipes.config.files import compose, split_words
from loop_recipes.config.rollout_node import described_node
from rollout_server import cli
from rollout_server.config import write_node_config


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; exits with 0 after an orderly stop, with 1 and one line on stderr after a failure."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = verb_parser("node", __doc__)
    if words[:1] in (["status"], ["cancel"]):
        cli.main(words, parser.prog)
        return
    words, node_words = split_words(words)
    parser.add_argument("words", nargs="*", metavar="CONFIG key=value", help="a config of loop_appworld, and changes")
    parser.add_argument("--file", metavar="YAML", help="a node's own YAML in place of CONFIG; see docs/rollout_node.md")
    options = parser.parse_intermixed_args(words)
    if options.file is not None:
        cli.main(["--config", options.file, *options.words, *node_words], parser.prog)
        return
    if not options.words:
        parser.error("give a config of loop_appworld, or a node's YAML with --file")
    name, *overrides = options.words
    if talk := difflib.get_close_matches(name, ("status", "cancel"), n=1):
        parser.error(f"no config {name!r}; did you mean {talk[0]!r}?")
    if (yaml := Path(name, "rollout_node.yaml")).is_file():
        parser.error(f"{name} is a folder, not a config; did you mean --file {yaml}?")
    try:
        file = _write_yaml(compose(name, overrides))
    except (ConfigError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
    except OmegaConfBaseException as error:
        sys.exit(f"{parser.prog}: config {name}: {str(error).splitlines()[0]}")
    cli.main(["--config", str(file), *node_words], parser.prog)


def _write_yaml(config: DictConfig) -> Path:
    node = described_node(config)
    output_dir = config.get("output_dir")
    require(isinstance(output_dir, str), f"output_dir must be str, not {output_dir!r}")
    file = made_folder("output_dir", Path(output_dir).resolve()) / "rollout_node.yaml"
    # Several nodes of one job write the same file; none may read half of it.
    with whole_file(file) as partial:
        write_node_config(node, partial)
    return file
