"""A tokenizer in which no text from outside can spell a control token.

A format's own scaffolding (headers, the section on tools) does hold control tokens, and the libraries that write it
hand scaffolding and messages to a tokenizer in one piece. So messages are *shielded* first: a mark is put inside each
of their words that would be read as a control token. :meth:`UnforgeableTokenizer.encode` reads control tokens where
they are whole, and takes the marks away before it encodes the rest as ordinary text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from agent_environments.observation import printable
from model_families.chat.tokenizer import read_tokenizer

MARK = "\ufdd0"
"""A code point that Unicode sets apart for a program's own use, and that is in no text."""
_CONTROL = re.compile(r"<.+>|\[.+\]", re.DOTALL)
"""The form of a word that ordinary text does not hold by chance."""


def check_added(file: Path, word: str, takes_blanks: bool) -> None:
    """Check that ordinary text has the same ids with an added token and without: here none is read in it.

    Raises:
        ValueError: the token is a word that ordinary text may hold, or takes the blanks beside it.
    """
    if _CONTROL.fullmatch(word) is None or takes_blanks:
        raise ValueError(f"{file}: the added token {word!r} is ordinary text, whose ids would change")


class Shield:
    """Puts a mark inside each of ``words``, wherever they stand in a text or in plain data with texts in it."""

    def __init__(self, words: Iterable[str]):
        longest_first = sorted(words, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")

    def __call__(self, value: Any) -> Any:
        match value:
            case str():
                return self._text(value)
            case Mapping():
                return {self(key): self(item) for key, item in value.items()}
            case list() | tuple():
                return [self(item) for item in value]
        return value

    def _text(self, text: str) -> str:
        text = printable(text).replace(MARK, "\ufffd")
        while self.pattern.search(text):  # what is left and right of a word may be one, too
            text = self.pattern.sub(lambda found: found[0][0] + MARK + found[0][1:], text)
        return text


class UnforgeableTokenizer:
    """The tokenizer of a model's folder, in the form that the package ``renderers`` asks for.

    Attributes:
        shield: puts marks into what :meth:`encode` must make no control token of.
        text: the folder's tokenizer without its control tokens: it encodes any text as ordinary tokens.
        vocab_size: number of ids, control tokens included.
        eos_token_id, unk_token_id: none that a renderer may rely on.

    Raises:
        ValueError: ordinary text has other ids without the added tokens, or spells one of them.
    """

    eos_token_id: int | None = None
    unk_token_id: int | None = None

    def __init__(self, model_dir: str | Path):
        file = Path(model_dir) / "tokenizer.json"
        try:
            plain = json.loads(file.read_bytes())
            added, plain["added_tokens"] = plain["added_tokens"], []
            self.text = Tokenizer.from_str(json.dumps({**plain, "post_processor": None}))
        except Exception as error:  # the library has no class of its own for it
            read_tokenizer(model_dir)  # says what is wrong with the file
            raise ValueError(f"{file} cannot be read without its added tokens: {error}") from error
        for token in added:
            word = token["content"]
            check_added(file, word, token["lstrip"] or token["rstrip"])
            if self.text.id_to_token(token["id"]) is not None:
                raise ValueError(f"{file}: {word} is in the vocabulary of ordinary text, which could forge it")
        self.shield = Shield(token["content"] for token in added)
        self._ids = {token["content"]: token["id"] for token in added}
        self._words = {token: word for word, token in self._ids.items()}
        self.vocab_size: int = self.text.get_vocab_size() + len(added)
        self.encode_text: Callable[[str], Sequence[int]] = lambda text: self.text.encode(text).ids

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of scaffolding with shielded text in it."""
        token_ids: list[int] = []
        position = 0
        for found in self.shield.pattern.finditer(text):
            token_ids += self._plain(text[position : found.start()])
            token_ids.append(self._ids[found[0]])
            position = found.end()
        return token_ids + self._plain(text[position:])

    def _plain(self, text: str) -> list[int]:
        return list(self.encode_text(text.replace(MARK, ""))) if text else []

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **options: Any) -> str:
        """Text of ids. Control tokens are shown as they are written, whatever is asked: no renderer leaves them out."""
        runs = [(word, list(run)) for word, run in groupby(token_ids, self._words.get)]
        return "".join(self.text.decode(run) if word is None else word * len(run) for word, run in runs)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._ids.get(token)
