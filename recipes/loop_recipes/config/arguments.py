"""The parsers of ``loop``'s verbs, so that a config and changes of it are written alike everywhere."""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import textwrap
from typing import NoReturn

from loop_formats.schema import fields_of, keys_meant
from loop_recipes.paths import KINDS, config_files
from rollout_server.config import as_written

_EXAMPLE = re.compile(r"( *(?:[A-Z_]+=\S+ )*loop \S.*?)(?: {3,}(\S.*))?")


class _Help(argparse.HelpFormatter):
    """Fills the paragraphs of a docstring, but not its commands. If a command and the words beside it are wider than
    the terminal, the words go below the command."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(self._paragraph(paragraph.replace("``", "`"), width) for paragraph in text.split("\n\n"))

    def _paragraph(self, text: str, width: int) -> str:
        if not _EXAMPLE.fullmatch(text.partition("\n")[0]):
            return textwrap.fill(text, width, break_on_hyphens=False)
        text = textwrap.indent(textwrap.dedent(text), "  ")
        lines = text.splitlines()
        if all(len(line) <= width for line in lines):
            return text
        examples: list[tuple[str, list[str]]] = []
        for line in lines:
            if match := _EXAMPLE.fullmatch(line):
                examples.append((match[1], [match[2] or ""]))
            else:
                examples[-1][1].append(line.strip())
        written = []
        for command, beside in examples:
            notes = textwrap.wrap(" ".join(filter(None, beside)), width - 8, break_on_hyphens=False)
            words = textwrap.wrap(command, width - 2, subsequent_indent=" " * 12, break_on_hyphens=False)
            written += [" \\\n".join(words), *(f"        {line}" for line in notes)]
        return "\n".join(written)


class _Parser(argparse.ArgumentParser):
    """Names the key or option that was probably meant: keys are not options, and none of them is required."""

    def error(self, message: str) -> NoReturn:
        message = message.removesuffix(", key=value")
        if match := re.match(r"unrecognized arguments: (--[\w.-]+)", message):
            option, options = match[1], self._option_string_actions
            near = difflib.get_close_matches(option, [*options], n=1, cutoff=0.7)
            keys = any(action.metavar == "key=value" for action in self._actions)
            word = _as_word(option.lstrip("-").replace("-", "_"), of_training=self.prog != "loop eval")
            cure = f"; a key has no dashes: {word}" if keys else ""
            message += f"; did you mean {near[0]}?" if near else cure
        super().error(message)


def _as_word(name: str, of_training: bool) -> str:
    """Return the word to suggest for an unknown option ``name`` after a config: ``key=VALUE``, or a shipped file."""
    from loop_recipes.config.files import compose  # the schemas, which the help does not need
    from loop_recipes.config.loop_config import LoopConfig

    if (kind := next((kind for kind, files in config_files().items() if name in files), None)) is not None:
        return f"{kind}={name}"
    known = not of_training or name in (*KINDS, *fields_of(LoopConfig))
    matches = [] if known else keys_meant(LoopConfig, as_written(compose("tiny_cpu")), name)
    return f"{matches[0] if len(matches) == 1 else name}=VALUE"


def verb_parser(verb: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser for ``loop VERB``; ``description``, a docstring, is printed as wide as the terminal is."""
    return _Parser(f"loop {verb}", description=inspect.cleandoc(description or ""), formatter_class=_Help)


def config_parser(verb: str, description: str | None, optional: bool = False) -> argparse.ArgumentParser:
    """Return a parser for ``loop VERB CONFIG [key=value ...]``, whose result has ``config`` and ``overrides``.

    Call the parser's ``parse_intermixed_args``, because words may stand before and after the options.
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
