"""Text to token ids and back, in the one chat format that is served and trained on (ChatML, as in Qwen2.5).

The rollout node builds every prompt here and the supervised recipe builds its demonstrations here, so both see the same
ids. A conversation only ever grows at its end: sampled ids are kept as they came and new ids are appended, because
encoding a decoded text again gives other ids more often than not.

Text is encoded with the parsing of special tokens switched off. An observation that holds the letters ``<|im_end|>``
becomes ordinary tokens and cannot close its turn or forge another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from agent_environments.protocol import Message

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
MOST_CACHED_CHARACTERS = 20_000
"""Of a message whose ids are kept: 512 messages of any length could fill the memory."""
CHARACTERS_PER_TOKEN = 8
"""Texts up to so many characters for each token that there is room for are encoded without asking whether they fit."""
SLICE = 4096
"""Characters that are encoded at once to find out whether a text fits."""
SLICE_SLACK = 4
"""Tokens by which cutting a text into slices may add to each: it cuts words in two."""


def read_tokenizer(model_dir: str | Path) -> Tokenizer:
    """The tokenizer of a model's folder.

    Raises:
        ValueError: no ``tokenizer.json`` in it, or a damaged one.
    """
    file = Path(model_dir) / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"no tokenizer.json in {model_dir}: give the folder of a Hugging Face model")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no class of its own for it
        raise ValueError(f"{file} is damaged: {error}; copy it anew from the model") from error


class ChatTokens:
    """The policy's tokenizer, with ChatML around it.

    Args:
        model_dir: folder that holds the policy's ``tokenizer.json``.

    Attributes:
        im_start, im_end: ids of the two ChatML marks.
        stop_ids: ids that end a turn when sampled: ``<|im_end|>``, ``<|endoftext|>``, ``<|im_start|>``.
        pad_id: id of ``<|endoftext|>``, Qwen's padding.
        vocab_size: number of ids the tokenizer knows, added tokens included; the model's embedding may be larger.

    Raises:
        ValueError: no ``tokenizer.json`` or a damaged one, a missing ChatML token, or a tokenizer in which text can
            spell one.
    """

    def __init__(self, model_dir: str | Path):
        file = Path(model_dir) / "tokenizer.json"
        self._tokenizer = read_tokenizer(model_dir)
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        known = {text: self._tokenizer.token_to_id(text) for text in (IM_START, IM_END, END_OF_TEXT)}
        ids = {text: token for text, token in known.items() if token is not None}
        missing = sorted(known.keys() - ids.keys())
        if missing:
            raise ValueError(f"{file} has no token {', '.join(missing)}: the policy must use the ChatML format")
        self.im_start, self.im_end, self.pad_id = ids[IM_START], ids[IM_END], ids[END_OF_TEXT]
        self.stop_ids: tuple[int, ...] = (self.im_end, self.pad_id, self.im_start)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        # The opening messages of all episodes of a task, and most of those of all tasks, are the same texts.
        self._encode_cached = lru_cache(maxsize=512)(self._encode)
        self._newline = self._encode("\n")
        self._assistant_header = [self.im_start, *self._encode("assistant\n")]
        forged = set(self._encode(f"{IM_START} {IM_END} {END_OF_TEXT}")) & set(self.stop_ids)
        if forged:
            raise ValueError(
                f"{file} does not mark {IM_START}, {IM_END}, {END_OF_TEXT} as special: text could forge turns"
            )

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def overfill(self, texts: Iterable[str], most: int) -> bool:
        """Whether ``texts`` together have more than ``most`` tokens, if that is so for sure.

        Ask before encoding what somebody else sends: the cost of asking grows with ``most`` and not with the texts, and
        what passes is not much longer than ``most`` tokens are.
        """
        texts = list(texts)
        if sum(map(len, texts)) <= CHARACTERS_PER_TOKEN * most:
            return False
        count = 0
        for text in texts:
            for start in range(0, len(text), SLICE):
                count += max(0, len(self._encode(text[start : start + SLICE])) - SLICE_SLACK)
                if count > most:
                    return True
        return False

    def encode_text(self, text: str) -> list[int]:
        """Ids of ordinary text; never a special token."""
        return list(self._encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids. Special tokens are shown as they are written."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids that open an episode: every message, then the header of the assistant's first turn."""
        token_ids: list[int] = []
        for message in messages:
            token_ids += self.message(message.role, message.content)
        return token_ids + self._assistant_header

    def message(self, role: str, content: str) -> list[int]:
        """One whole message, with its header, its end and the newline after it."""
        encode = self._encode_cached if len(content) <= MOST_CACHED_CHARACTERS else self._encode
        return [self.im_start, *encode(f"{role}\n{content}"), self.im_end, *self._newline]

    @property
    def assistant_header(self) -> list[int]:
        """The ids after which the policy speaks."""
        return self._assistant_header

    def ending(self, closed: bool) -> list[int]:
        """The ids between a sampled turn and the next message; ``closed`` as in :meth:`continuation`."""
        return [*self._newline] if closed else [self.im_end, *self._newline]

    def continuation(self, observation: str, closed: bool) -> list[int]:
        """The ids between one assistant turn and the next.

        ``closed`` says that the turn's last sampled token was ``<|im_end|>``; if it was not (token cap, another stop
        token), the mark is put in, and nobody trains on it.
        """
        said = [self.im_start, *self._encode(f"user\n{observation}"), self.im_end, *self._newline]
        return [*self.ending(closed), *said, *self._assistant_header]

    def spans(self, text: str) -> list[tuple[int, int]]:
        """(start, end) character offsets of the tokens of ``text``, in order."""
        return self._tokenizer.encode(text, add_special_tokens=False).offsets
