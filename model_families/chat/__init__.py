"""The chat of a model: how its folder's template writes messages, tools and thinking as token ids, and how sampled ids
are read."""

from __future__ import annotations

from pathlib import Path

from model_families.chat.format import ChatFormat, ObservationRole, Thinking
from model_families.chat.proof import check_template
from model_families.chat.template import ChatTemplate
from model_families.chat.tokenizer import read_tokenizer


def open_chat(
    model_dir: str | Path, thinking: Thinking | None = None, observation_role: ObservationRole | None = None
) -> ChatFormat:
    """Return the chat format of the model in ``model_dir``, learned from the template in that folder.

    Args:
        thinking: how thinking is treated; None keeps the template's default.
        observation_role: role of the environment's answers; None chooses the role that suits ``thinking``.

    Raises:
        ValueError: the folder has no template, cannot be trained in its form, or refuses these settings; one line.
    """
    tokens = read_tokenizer(model_dir)
    if ChatTemplate(model_dir).text is None:
        raise ValueError(
            f"{model_dir} has no chat template: add the model's own chat_template.jinja (its instruct version has "
            "one), or take a model that was taught to chat"
        )
    try:
        chat = ChatFormat(model_dir, thinking, observation_role)
        check_template(tokens, chat)
    except ValueError as error:
        if thinking is not None or observation_role is not None:
            open_chat(model_dir)  # raises what is wrong with the folder itself
            raise
        raise ValueError(
            f"{model_dir}: its own chat template cannot be trained: {error}; put one whose turns control tokens divide "
            "into its chat_template.jinja, or take a model whose chat is one of docs/chat_formats.md"
        ) from error
    return chat
