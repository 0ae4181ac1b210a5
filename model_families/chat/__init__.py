"""Chat formats: how a model family writes messages, tools and thinking as token ids, and reads what was sampled."""

from __future__ import annotations

import json
from pathlib import Path

from model_families.base_model import FAMILIES
from model_families.chat.chatml import IM_START, ChatML
from model_families.chat.format import ChatFormat, ObservationRole, Thinking
from model_families.chat.rendered import RENDERERS, Rendered
from model_families.chat.tokenizer import read_tokenizer

FORMATS = (ChatML.name, *RENDERERS)


def open_chat(
    model_dir: str | Path,
    name: str | None = None,
    thinking: Thinking | None = None,
    observation_role: ObservationRole | None = None,
) -> ChatFormat:
    """The chat of the model in ``model_dir``.

    Args:
        name: one of :data:`FORMATS`; None for what the folder says.
        thinking: None for the format's own way.
        observation_role: None for what suits ``thinking``.

    Raises:
        ValueError: a format that is not known, or that this tokenizer or these settings do not fit; one line.
    """
    if name is None:
        name = chat_of(model_dir)
        _check_known(model_dir, name)
    if name in RENDERERS:
        return Rendered(model_dir, name, thinking, observation_role)
    if name != ChatML.name:
        raise ValueError(f"chat format {name!r} is not known; choose one of {', '.join(FORMATS)}")
    return ChatML(model_dir, thinking, observation_role)


def _check_known(model_dir: str | Path, name: str) -> None:
    """Raise ValueError where ChatML is only what is left, and the tokenizer does not know it either."""
    if name != ChatML.name or read_tokenizer(model_dir).token_to_id(IM_START) is not None:
        return
    raise ValueError(
        f"{model_dir}: no chat format here is the model's: its tokenizer has no {IM_START}, as {ChatML.name} needs, "
        f"nor the words of another ({', '.join(FORMATS)}); Mistral's own and Llama 2's are not known"
    )


def chat_of(model_dir: str | Path) -> str:
    """The format of a model by its folder: that of its family where its tokenizer has that format's words, else
    ChatML."""
    try:
        (architecture,) = json.loads((Path(model_dir) / "config.json").read_text(encoding="utf-8"))["architectures"]
        name = FAMILIES[architecture].chat
        words = (Path(model_dir) / "tokenizer.json").read_text(encoding="utf-8")
    except (OSError, ValueError, TypeError, KeyError):
        return ChatML.name  # of a tokenizer alone; what is wrong with it, its format says
    return name if name in RENDERERS and json.dumps(RENDERERS[name].turn_end) in words else ChatML.name
