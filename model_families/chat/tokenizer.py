"""Text to token ids and back, by the tokenizer of a model's folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_CACHED_CHARACTERS = 20_000
"""Length of a text whose ids are cached: 512 texts of any length could fill the memory."""
CHARACTERS_PER_TOKEN = 8
"""Texts up to so many characters for each token that there is room for are encoded without asking whether they fit."""
SLICE = 4096
"""Characters that are encoded at once to find out whether a text fits."""
SLICE_SLACK = 4
"""Tokens by which cutting a text into slices may add to each: it cuts words in two."""


def read_tokenizer(model_dir: str | Path) -> Tokenizer:
    """Read the tokenizer of a model's folder.

    Raises:
        ValueError: ``tokenizer.json`` is missing or damaged, or the package tokenizers is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ValueError("no tokens without tokenizers: pip install 'torchtune-loop[train]'") from error
    file = Path(model_dir) / "tokenizer.json"
    if not file.is_file():
        path = str(model_dir)
        save = f"from transformers import AutoTokenizer as T; T.from_pretrained({path!r}).save_pretrained({path!r})"
        cure = (
            f'write it once: `python -c "{save}"`'
            if any(file.parent.glob("tokenizer*"))
            else "copy it there from the model"
        )
        raise ValueError(f"no tokenizer.json in {path}: {cure}")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no class of its own for it
        raise ValueError(f"{file} is damaged: {error}; copy it anew from the model") from error


class TextTokens:
    """The policy's tokenizer for ordinary text.

    Args:
        tokenizer: encodes every text, whatever it holds, without a control token.

    Attributes:
        vocab_size: number of ids the tokenizer knows, added tokens included; the model's embedding may be larger.
    """

    def __init__(self, tokenizer: Tokenizer):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def overfill(self, texts: Iterable[str], most: int) -> bool:
        """Return True if ``texts`` together certainly have more than ``most`` tokens.

        Call this before encoding text from outside: its cost grows with ``most``, not with the texts. Texts that pass
        are not much longer than ``most`` tokens.
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
        """Return the ids of ordinary text. No id is a control token."""
        return list(self._encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens in their written form."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return (start, end) character offsets of the tokens of ``text``, in order."""
        return self._tokenizer.encode(text, add_special_tokens=False).offsets
