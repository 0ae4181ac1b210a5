"""The chat template in a model's folder, rendered as transformers does it, without transformers.

A template is a program by the folder's maker: it runs in Jinja's sandbox, which lets it read its inputs and
change nothing, within bounds of time and memory.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loop_plumbing.bounded_work import TooMuch, bounded

TODAY = datetime.datetime(2024, 7, 26)
"""The date that every template gets, so that a task's prompt is always the same."""
CPU_S, MEMORY, LONGEST = 5.0, 1 << 30, 1 << 26
"""Bounds of one rendering: CPU seconds, bytes of memory, and characters written."""
LARGEST = 1 << 64
"""Whole numbers that a template may multiply: Python takes hours for large ones, and cannot be interrupted."""
DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of templates where a folder holds several."""


class _GenerationTag(Extension):
    """Replaces ``{% generation %}``, which marks text to train on, with its content."""

    tags = {"generation"}  # noqa: RUF012 - as its base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounded(ImmutableSandboxedEnvironment):
    """Refuses to compute with numbers that are too large for any chat."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if any(isinstance(each, int) and abs(each) > LARGEST for each in (left, right)) or (
            operator == "**" and abs(right) > LARGEST.bit_length()
        ):
            raise SecurityError("it computes with numbers that are too large")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """The template of the model in ``model_dir``.

    Attributes:
        named: the texts of the folder's templates, by their names.
        text: of the chat template; None if the folder has no template.
        words: the tokenizer's special words by the names that templates use, such as ``bos_token``.

    Raises:
        ValueError: a file of the template cannot be read.
    """

    def __init__(self, model_dir: str | Path):
        folder = Path(model_dir)
        self.named = _templates(folder)
        self.words = _special_words(folder)
        self.text: str | None = self.named.get(DEFAULT)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        ask: bool = True,
        **settings: Any,
    ) -> str:
        """Return the text of ``messages``, up to where the assistant speaks.

        Args:
            ask: whether the text ends with the opening of the assistant's message.
            messages: role and content of each message; an assistant's message may have ``reasoning_content``.
            tools: JSON schemas, as in OpenAI's API.
            settings: the template's own settings, such as ``enable_thinking``.

        Raises:
            ValueError: the template refuses the messages, is missing or broken, or exceeds a bound; one line.
        """
        text = self.named.get(WITH_TOOLS, self.text) if tools else self.text
        if text is None:
            raise ValueError("the folder has no chat template")
        inputs = {"messages": list(messages), "tools": list(tools) or None, "documents": None}
        try:
            with bounded(CPU_S, MEMORY):
                written = _compiled(text).render(**self.words, **inputs, add_generation_prompt=ask, **settings)
            if len(written) > LONGEST:
                raise TooMuch(f"writes {len(written):,} characters")
            return written
        except TooMuch as error:
            raise ValueError(f"the chat template {error}") from error
        except Exception as error:  # whatever a stranger's program raises
            raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


@lru_cache(maxsize=8)
def _compiled(text: str) -> Template:
    environment = _Bounded(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = TODAY.strftime
    return environment.from_string(text)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Return ``value`` as JSON, without the HTML escapes that Jinja's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _templates(folder: Path) -> dict[str, str]:
    """Return the templates by name. Template files have priority over the tokenizer's configuration."""
    texts = {}
    try:
        written = _read(folder / "tokenizer_config.json").get("chat_template")
        match written:
            case str():
                texts = {DEFAULT: written}
            case list():
                texts = {str(each["name"]): str(each["template"]) for each in written}
            case dict():
                texts = {str(name): str(text) for name, text in written.items()}
        own = folder / "chat_template.jinja"
        files = ({DEFAULT: own} if own.is_file() else {}) | {
            file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))
        }
        if files:
            texts = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"the chat template of {folder} cannot be read: {error!r}") from error
    return texts


def _special_words(folder: Path) -> dict[str, str]:
    """Return the tokenizer's special words, such as those that begin and end a text, by their names in templates."""
    words = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in _read(folder / name).items():
            word = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(word, str):
                words[key] = word
    return words


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
