"""Chat formats: how a model family writes messages, tools and thinking as token ids, and reads what was sampled."""

from __future__ import annotations

from pathlib import Path

from agent_environments.tool_calls import CALL_OPENS
from model_families.chat.chatml import END_OF_TEXT, IM_END, IM_START, ChatML
from model_families.chat.format import ChatFormat, ObservationRole, Thinking
from model_families.chat.messages import THOUGHT_CLOSES
from model_families.chat.proof import check_template
from model_families.chat.rendered import RENDERERS, Rendered
from model_families.chat.template import ChatTemplate
from model_families.chat.templated import Templated
from model_families.chat.tokenizer import read_tokenizer

FORMATS = (ChatML.name, *RENDERERS, Templated.name)
_WORDS = {
    name: (row.turn_end, row.pad, row.header, *((THOUGHT_CLOSES, CALL_OPENS) if row.thinks else ()))
    for name, row in RENDERERS.items()
} | {ChatML.name: (IM_START, IM_END, END_OF_TEXT)}
"""The words that a tokenizer must know for a format, the more telling ones first."""


def open_chat(
    model_dir: str | Path,
    name: str | None = None,
    thinking: Thinking | None = None,
    observation_role: ObservationRole | None = None,
) -> ChatFormat:
    """The chat of the model in ``model_dir``.

    The folder says which format is its own, by the words of its tokenizer and its chat template: the first whose words
    are there and that writes what the template writes, and else the template itself.

    Args:
        name: one of :data:`FORMATS`, which is compared with no template; None for the folder's own.
        thinking: None for the format's own way.
        observation_role: None for what suits ``thinking``.

    Raises:
        ValueError: a format that is not known, or that this tokenizer or these settings do not fit, or a template
            whose form cannot be written here; one line.
    """
    if name is not None:
        return _open(model_dir, name, thinking, observation_role)
    chat = _own_chat(model_dir)
    if (thinking or chat.thinking, observation_role or chat.observation_role) == (chat.thinking, chat.observation_role):
        return chat
    chat = _open(model_dir, chat.name, thinking, observation_role)
    if (template := ChatTemplate(model_dir)).text is not None:
        check_template(model_dir, chat, template)
    return chat


def _own_chat(model_dir: str | Path) -> ChatFormat:
    """The chat that the folder says, with the settings that suit it."""
    tokens, template = read_tokenizer(model_dir), ChatTemplate(model_dir)
    likely = [each for each, words in _WORDS.items() if all(tokens.token_to_id(word) is not None for word in words)]
    if template.text is None:
        if likely:
            return _open(model_dir, likely[0])
        raise ValueError(
            f"{model_dir}: it has no chat template, and its tokenizer has not the words of a chat format "
            f"({', '.join(_WORDS)}): add the model's own chat_template.jinja, or take a model that was taught to chat"
        )
    for each in (*likely, Templated.name):
        try:
            chat = _open(model_dir, each)
            check_template(model_dir, chat, template)
        except ValueError as error:
            reason = error
        else:
            return chat
    forms = f"give model.chat_format: {' or '.join(likely)} to train in that form all the same, or " if likely else ""
    raise ValueError(
        f"{model_dir}: its own chat template cannot be trained: {reason}; {forms}take a model whose chat is one of "
        "docs/chat_formats.md"
    ) from reason


def _open(
    model_dir: str | Path,
    name: str,
    thinking: Thinking | None = None,
    observation_role: ObservationRole | None = None,
) -> ChatFormat:
    if name in RENDERERS:
        return Rendered(model_dir, name, thinking, observation_role)
    for each in (ChatML, Templated):
        if name == each.name:
            return each(model_dir, thinking, observation_role)
    raise ValueError(f"chat format {name!r} is not known; choose one of {', '.join(FORMATS)}")
