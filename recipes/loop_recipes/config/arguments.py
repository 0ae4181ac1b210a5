"""The parsers of ``loop``'s verbs, so that a config and what differs from it are written alike everywhere."""

from __future__ import annotations

import argparse
import inspect


def verb_parser(verb: str, description: str | None) -> argparse.ArgumentParser:
    """A parser for ``loop VERB``; ``description``, a docstring, is printed with its lines as they are."""
    text = inspect.cleandoc(description or "")
    return argparse.ArgumentParser(
        f"loop {verb}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def config_parser(verb: str, description: str | None, optional: bool = False) -> argparse.ArgumentParser:
    """A parser for ``loop VERB CONFIG [key=value ...]``: ``config`` and ``overrides`` of what it parses.

    Call its ``parse_intermixed_args``: words may stand before and after the options.
    """
    parser = verb_parser(verb, description)
    parser.add_argument(
        "config", nargs="?" if optional else None, metavar="CONFIG", help="a machine's name, or a YAML file"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="world=, preset=, algorithm=, or values that replace those of CONFIG; ~key leaves one out",
    )
    return parser
