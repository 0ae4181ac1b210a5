"""The parsers of ``loop``'s verbs, so that a config and changes of it are written alike everywhere."""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import textwrap
from typing import NoReturn

_EXAMPLE = re.compile(r" *(?:[A-Z_]+=\S+ )*loop \S")


class _Help(argparse.HelpFormatter):
    """Fills the paragraphs of a docstring, but not its commands, which can be copied as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.replace("``", "`").split("\n\n")
        return "\n\n".join(
            each if _EXAMPLE.match(each) else textwrap.fill(each, width, break_on_hyphens=False) for each in paragraphs
        )


class _Parser(argparse.ArgumentParser):
    """Names the key or option that was probably meant: keys are not options, and none of them is required."""

    def error(self, message: str) -> NoReturn:
        message = message.removesuffix(", key=value")
        if match := re.match(r"unrecognized arguments: (--[\w.-]+)", message):
            option, options = match[1], self._option_string_actions
            near = difflib.get_close_matches(option, [*options], n=1, cutoff=0.7)
            keys = any(action.metavar == "key=value" for action in self._actions)
            cure = f"; a key has no dashes: {option.lstrip('-').replace('-', '_')}=VALUE" if keys else ""
            message += f"; did you mean {near[0]}?" if near else cure
        super().error(message)


def verb_parser(verb: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser for ``loop VERB``; ``description``, a docstring, is printed as wide as the terminal is."""
    return _Parser(f"loop {verb}", description=inspect.cleandoc(description or ""), formatter_class=_Help)


def config_parser(verb: str, description: str | None, optional: bool = False) -> argparse.ArgumentParser:
    """Return a parser for ``loop VERB CONFIG [key=value ...]``, whose result has ``config`` and ``overrides``.

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
