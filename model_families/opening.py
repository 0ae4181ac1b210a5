"""Opens the folder of a model, and proves its description before anything expensive begins.

Trainer, rollout node and checks open a model here, so that all accept the same models. The weights must be one set, as
config.json describes it. The chat must be the folder's own template's: a few conversations have the same ids in both.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from model_families.base_model import BaseModel
from model_families.chat import open_chat
from model_families.chat.format import ChatFormat, ObservationRole, Thinking
from model_families.chat.proof import QUESTION, SYSTEM
from model_families.chat.tokenizer import read_tokenizer
from model_families.stored_weights import check_weights

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def open_weights(folder: str | Path) -> BaseModel:
    """Return the description of the model in ``folder``, after checking that its weights agree with it.

    Raises:
        ValueError: the model cannot be used; the message names the file, the fault and the cure in one line.
    """
    base = BaseModel.read(folder)
    check_weights(folder, base)
    return base


def check_served_as(folder: str | Path, base: BaseModel, max_context: int, dtype: str) -> None:
    """Check that a server of ``base`` can hold ``max_context`` tokens, and compute in ``dtype``.

    Raises:
        ValueError: the model has too few positions, too short a sliding window, or four-bit weights and float32.
    """
    if max_context > base.positions:
        raise ValueError(
            f"model.max_context is {max_context}, and the model in {folder} has {base.positions} positions: lower it "
            "(config.json, max_position_embeddings or sliding_window)"
        )
    if base.four_bits is not None:
        base.four_bits.check_computed_in(half=dtype != "float32")


def open_model_chat(
    folder: str | Path,
    base: BaseModel,
    thinking: Thinking | None = None,
    observation_role: ObservationRole | None = None,
) -> ChatFormat:
    """Return the chat format of the model in ``folder``. Checks that the embedding has a row for each of its ids.

    Args:
        base: the model's description.
        thinking, observation_role: as in :func:`~model_families.chat.open_chat`.

    Raises:
        ValueError: the message names what does not fit, in one line.
    """
    chat = open_chat(folder, thinking, observation_role)
    _check_ids(folder, chat, read_tokenizer(folder), base)
    return chat


def _check_ids(folder: str | Path, chat: ChatFormat, tokens: Tokenizer, base: BaseModel) -> None:
    ordinary = set(tokens.get_vocab(with_added_tokens=True).values()) - chat.control_ids
    highest = max(*ordinary, *chat.stop_ids, chat.pad_id, *chat.opening([SYSTEM, QUESTION]))
    if highest >= base.vocabulary:
        word = tokens.id_to_token(highest)
        raise ValueError(
            f"{folder}: the tokenizer's {word!r} has the id {highest}, and the embedding has {base.vocabulary} rows "
            "(config.json, vocab_size): resize the model's embedding to the tokenizer and save both"
        )
