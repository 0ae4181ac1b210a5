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


def config_parser(verb: str, description: str | None, recipe: str = "loop_appworld") -> argparse.ArgumentParser:
    """A parser for ``loop VERB CONFIG [key=value ...]``: ``config`` and ``overrides`` of what it parses.

    Call its ``parse_intermixed_args``: words may stand before and after the options.
    """
    parser = verb_parser(verb, description)
    parser.add_argument("config", metavar="CONFIG", help=f"a config of {recipe}: its name, or a YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="values that replace those of CONFIG; ~key leaves one out"
    )
    return parser
