"""Opens the folder of a model: what it says of itself is proven before anything expensive begins.

Trainer, rollout node and checks open a model here, so that what one takes, the others take. The weights are those that
config.json describes, and one set of them. The chat is that of the folder's own template: a few conversations have the
same ids in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from model_families.base_model import BaseModel
from model_families.chat import open_chat
from model_families.chat.format import ChatFormat, ObservationRole, Thinking
from model_families.chat.messages import ChatMessage, Tools
from model_families.chat.template import ChatTemplate
from model_families.chat.tokenizer import read_tokenizer
from model_families.stored_weights import check_weights

SYSTEM = ChatMessage("system", "Be brief.")
QUESTION = ChatMessage("user", "Add 1 to é.\n\n```python\nprint(1)\n```\n")
ANSWER, THOUGHT = "Done: 2.", "I add.\nThen I look."
RESULT = " 2\n"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds to é.",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    },
}
_SHOWN = 60
"""Characters of each side of a difference."""


def open_weights(folder: str | Path, max_context: int | None = None) -> BaseModel:
    """The description of the model in ``folder``, whose weights are as it says.

    Args:
        max_context: tokens of a sequence that it is to take; None asks nothing.

    Raises:
        ValueError: names the file, what is wrong with it and the cure; one line.
    """
    base = BaseModel.read(folder)
    check_positions(folder, base, max_context)
    check_weights(folder, base)
    return base


def check_positions(folder: str | Path, base: BaseModel, max_context: int | None) -> None:
    """Check that ``base`` attends over ``max_context`` tokens.

    Raises:
        ValueError: it has fewer positions, or a sliding window cuts them.
    """
    if max_context is not None and max_context > base.positions:
        raise ValueError(
            f"model.max_context is {max_context}, and the model in {folder} has {base.positions} positions: lower it "
            "(config.json, max_position_embeddings or sliding_window)"
        )


def open_model_chat(
    folder: str | Path,
    base: BaseModel,
    name: str | None = None,
    thinking: Thinking | None = None,
    observation_role: ObservationRole | None = None,
) -> ChatFormat:
    """The chat of the model in ``folder``, which is that of the folder's own template, unless its ``name`` is given.

    Args:
        base: the model, whose embedding has a row for each token that is written.
        name: of the format, or None for what the folder says; the other arguments are those of
            :func:`~model_families.chat.open_chat`.

    Raises:
        ValueError: what does not fit, or the first difference to the template; one line.
    """
    chat = open_chat(folder, name, thinking, observation_role)
    tokens, template = read_tokenizer(folder), ChatTemplate(folder)
    _check_ids(folder, chat, tokens, base)
    if name is None and template.text is not None:
        for messages, tools in _conversations(chat, template):
            _check_same(folder, chat, tokens, template, messages, tools)
    return chat


def _check_ids(folder: str | Path, chat: ChatFormat, tokens: Tokenizer, base: BaseModel) -> None:
    added = tokens.get_added_tokens_decoder()
    ordinary = (token for token in tokens.get_vocab(with_added_tokens=False).values() if token not in added)
    highest = max(*ordinary, *chat.stop_ids, chat.pad_id, *chat.opening([SYSTEM, QUESTION]))
    if highest >= base.vocabulary:
        word = tokens.id_to_token(highest)
        raise ValueError(
            f"{folder}: the tokenizer's {word!r} has the id {highest}, and the embedding has {base.vocabulary} rows "
            "(config.json, vocab_size): resize the model's embedding to the tokenizer and save both"
        )


def _conversations(chat: ChatFormat, template: ChatTemplate) -> list[tuple[list[ChatMessage], Tools]]:
    """What an episode is made of, as far as the format writes it as a template does (docs/chat_formats.md)."""
    asked = [SYSTEM, QUESTION]
    found: list[tuple[list[ChatMessage], Tools]] = [([QUESTION], ()), (asked, ())]
    if chat.thinking != "off":  # keeps the empty block that was served
        thinks = chat.thinking == "stripped" or (chat.thinking == "kept" and chat.observation_role == "tool")
        spoken = ChatMessage("assistant", ANSWER, reasoning=THOUGHT if thinks else "")
        found.append(([*asked, spoken, ChatMessage(chat.observation_role, RESULT)], ()))
    if "tools" in (template.text or ""):
        found.append((asked, (ADD,)))
    return found


def _check_same(
    folder: str | Path,
    chat: ChatFormat,
    tokens: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[ChatMessage],
    tools: Tools,
) -> None:
    settings = {"enable_thinking": False} if chat.thinking == "off" else {}
    cure = (
        f"give model.chat_format: {chat.name} to train in that form all the same, or take a model whose chat is one of "
        "docs/chat_formats.md"
    )
    try:
        text = template.render(list(map(_as_given, messages)), tools, **settings)
    except ValueError as error:
        raise ValueError(
            f"{folder}: its own chat template refuses a conversation that chat format {chat.name} writes ({error}); "
            f"{cure}"
        ) from error
    own, ours = tokens.encode(text, add_special_tokens=False).ids, chat.opening(messages, tools)
    if own != ours:
        differ = _difference(chat, own, ours)
        raise ValueError(f"{folder}: its own chat template and chat format {chat.name} differ, {differ}; {cure}")


def _as_given(message: ChatMessage) -> Mapping[str, Any]:
    thought = {"reasoning_content": message.reasoning} if message.reasoning else {}
    return {"role": message.role, "content": message.content, **thought}


def _difference(chat: ChatFormat, own: Sequence[int], ours: Sequence[int]) -> str:
    pairs = zip(own, ours, strict=False)
    same = next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(own), len(ours)))
    before = chat.decode(own[:same])[-_SHOWN // 2 :]
    sides = [chat.decode(ids[same:])[:_SHOWN] for ids in (own, ours)]
    if sides[0] == sides[1]:
        first = [list(ids[same : same + 4]) for ids in (own, ours)]
        return f"in the ids of the same text {sides[0]!r}: {first[0]} in the template, {first[1]} in the format"
    where = f"after {before!r}" if before else "at the beginning"
    said = [repr(side) if side else "nothing" for side in sides]
    return f"{where}: {said[0]} in the template, {said[1]} in the format"
