"""Exports a run's policy: the adapter as it is, with tokenizer and chat template beside it, or merged into its base.

    loop export runs/demo
    loop export runs/demo merge=bf16
    loop export runs/demo policy=policy-v0007 to=shared/my_policy

The folder has a card and the line that serves it by vLLM. A merged model is compared with the adapter on rollouts of
the run; rollouts=64 sets their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loop_formats.run_files import WriteFailed
from loop_formats.schema import ConfigError, from_mapping
from loop_recipes.config.arguments import verb_parser
from loop_recipes.config.files import check_overrides, with_words
from loop_recipes.exit_status import exit_status


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the folder; returns the exit status."""
    parser = verb_parser("export", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a training run")
    parser.add_argument("words", nargs="*", metavar="key=value", help="merge=, policy=, to=, rollouts=")
    options = parser.parse_intermixed_args(arguments)
    return exit_status(parser.prog, lambda: _export(options.run, options.words), (ConfigError, WriteFailed, OSError))


def _export(run: Path, words: Sequence[str]) -> str:
    from loop_recipes.export.policy import ExportConfig, export  # the config of a run, and with it torch

    check_overrides(words)
    return "\n".join(export(run, from_mapping(ExportConfig, with_words({}, words))).lines())
