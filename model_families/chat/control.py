"""A tokenizer in which no text from outside can spell a control token.

A format's own scaffolding (headers, the section on tools) does hold control tokens, and what writes it hands
scaffolding and messages to a tokenizer in one piece. So messages are *shielded* first: a mark is put inside each of
their words that would be read as a control token. :meth:`UnforgeableTokenizer.encode` knows the control tokens by
names that no text can hold. It gives these names to the words that are whole, and takes the marks out of the others,
which become ordinary text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from loop_plumbing.sanitize import printable
from model_families.chat.tokenizer import MAX_CACHED_CHARACTERS, read_tokenizer

MARK, HIDDEN = "\ufdd0", "\ufdd1"
"""Code points that Unicode sets apart for a program's own use, and that are in no text: the first breaks a word that is
not a control token, the second begins the name of one."""
_CONTROL = re.compile(r"<.+>|\[.+\]", re.DOTALL)
"""The form of a word that ordinary text does not hold by chance."""


def _is_control(token: Mapping[str, Any], written: str, ends: Container[int]) -> bool:
    """Return whether an added token, as ``tokenizer.json`` has it, is a control token.

    Other added tokens count as ordinary words: Gemma's ``<table>``, for example, divides no turns.
    """
    word = token["content"]
    meant = word in written or token["id"] in ends or word.startswith(("<|", "<\uff5c"))
    return bool(token["special"]) or (meant and _CONTROL.fullmatch(word) is not None)


class Shield:
    """Puts a mark inside each of ``words`` that occurs in a text, or in a text within plain data."""

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
        text = printable(text).replace(MARK, "\ufffd").replace(HIDDEN, "\ufffd")
        while self.pattern.search(text):  # what is left and right of a word may be one, too
            text = self.pattern.sub(lambda word: word[0][0] + MARK + word[0][1:], text)
        return text


class UnforgeableTokenizer:
    """The tokenizer of a model's folder.

    Args:
        written: the text of the chat template.
        ends: the ids that end a generated text.

    Attributes:
        shield: puts marks into text from which :meth:`encode` must make no control token.
        text: the folder's tokenizer, whose control tokens have names that no text holds.
        ids: maps the word of each control token to its id.

    Raises:
        ValueError: the tokenizer cannot be read, or a control token is a word of ordinary text.
    """

    def __init__(self, model_dir: str | Path, written: str, ends: Container[int]):
        file = Path(model_dir) / "tokenizer.json"
        try:
            from tokenizers import Tokenizer

            stored = json.loads(file.read_bytes())
            self.ids: dict[str, int] = {
                token["content"]: token["id"] for token in stored["added_tokens"] if _is_control(token, written, ends)
            }
            self.text = Tokenizer.from_str(json.dumps(_renamed(stored, self.ids)))
        except Exception as error:  # the library has no class of its own for it
            read_tokenizer(model_dir)  # raises what is wrong with the file
            raise ValueError(f"{file} cannot be read with its control tokens renamed: {error}") from error
        for word, token in self.ids.items():
            if _CONTROL.fullmatch(word) is None:
                raise ValueError(f"{file}: the control token {word!r} is ordinary text, whose ids would change")
            if self.text.token_to_id(HIDDEN + word) != token:
                raise ValueError(f"{file}: {word} has the id {token}, and the tokenizer makes another of it")
        self.text.no_truncation()
        self.text.no_padding()
        self.shield = Shield(self.ids)
        self._encode_cached = lru_cache(maxsize=512)(self._encode)

    def encode(self, text: str) -> list[int]:
        """Return the ids of template text that contains shielded text."""
        named = self.shield.pattern.sub(lambda word: HIDDEN + word[0], text).replace(MARK, "")
        return list(self._encode_cached(named) if len(named) <= MAX_CACHED_CHARACTERS else self._encode(named))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.text.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, with control tokens in their written form."""
        return self.text.decode(list(token_ids), skip_special_tokens=False).replace(HIDDEN, "")


def _renamed(stored: Mapping[str, Any], control: Container[str]) -> dict[str, Any]:
    """Return the content of ``tokenizer.json`` with its control tokens renamed, in the vocabulary too."""

    def name(word: Any) -> Any:
        return HIDDEN + word if isinstance(word, str) and word in control else word

    model = dict(stored["model"])
    words = model["vocab"]
    if isinstance(words, Mapping):
        model["vocab"] = {name(word): token for word, token in words.items()}
    else:
        model["vocab"] = [[name(word), *score] for word, *score in words]
    for key in ("unk_token", "unk_piece"):
        if key in model:
            model[key] = name(model[key])
    if model.get("merges"):
        model["merges"] = [pair for pair in model["merges"] if not _makes(pair, control)]
    added = [{**token, "content": name(token["content"])} for token in stored["added_tokens"]]
    return {**stored, "model": model, "added_tokens": added, "post_processor": None}


def _makes(pair: str | Sequence[str], control: Container[str]) -> bool:
    """Return whether a merge makes a control token from text, or uses a control token as part of a word."""
    left, right = pair.split(" ", 1) if isinstance(pair, str) else pair
    return left + right in control or left in control or right in control
