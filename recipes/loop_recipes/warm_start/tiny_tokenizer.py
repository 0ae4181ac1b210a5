"""A byte-level BPE for the tiny policy: Qwen2.5's special tokens and chat format, a vocabulary of its own.

Values that a small model has to copy out of an observation (passwords, e-mail addresses, ids) must fall into the same
few pieces everywhere. So unlike Qwen2.5's own rule the pre-tokeniser never joins a quote, bracket or blank to the
letters after it (a blank goes with the lower-case word before it), keeps an identifier with its underscores in one
piece (API names become single tokens) and cuts numbers into pairs of digits from the left. Pairs of digits and open
syllables, which the names of the synthetic world are made of, are the only merges: other pieces are whole pre-tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from model_families.own_tokenizer import read_as_written

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_TOKEN, STOP_TOKEN = "<|endoftext|>", "<|im_end|>"

PIECES = r"[a-z_]+ ?|[A-Z][a-z]+|[A-Z]+|\d{1,2}|[^A-Za-z0-9\s]+(?: [^A-Za-z0-9\s]+)* ?|\n *|\s+"
"""Pre-token pattern. In order: lower-case words and identifiers, capitalised words, capitals, digits by twos,
punctuation (with single blanks inside, as in `": "`), a line break with its indentation, other white space."""

DIGIT_PAIRS = tuple(f"{number:02d}" for number in range(100))
SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprstv" for vowel in "aeiou")
MERGED = (*DIGIT_PAIRS, *SYLLABLES, *(syllable.capitalize() for syllable in SYLLABLES))
FEWEST_PIECES = len(SPECIAL_TOKENS) + len(pre_tokenizers.ByteLevel.alphabet()) + len(MERGED)
"""The smallest ``vocab_size``, of a vocabulary without a whole word."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def piece_spans(text: str) -> Sequence[tuple[int, int]]:
    """Return (start, end) of the pre-tokens of ``text``: a stand-in for token spans before a vocabulary exists."""
    return [span for _, span in pre_tokenizers.Split(Regex(PIECES), "isolated").pre_tokenize_str(text)]


def train(texts: Iterable[str], vocab_size: int, min_frequency: int) -> Tokenizer:
    """Train on ``texts``; the special tokens come last, as in Qwen2.5, and take their share of ``vocab_size``.

    The most frequent pre-tokens, with at least ``min_frequency`` occurrences, become one piece each; single passwords
    and names are too rare for that. All others are cut into pairs of digits, open syllables and bytes. Byte-pair merges
    of words would leave more pieces behind, such as the ``lar`` of ``dollars``: if a name contains it, that part of the
    name means something else everywhere else, and the name is not copied.
    """
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cut = pre_tokenizers.Sequence([split, to_bytes])
    counts = Counter(piece for text in texts for piece, _ in cut.pre_tokenize_str(text))
    pieces = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *MERGED])
    words = [word for word, count in counts.most_common() if count >= min_frequency and word not in pieces]
    pieces |= dict.fromkeys(words[: vocab_size - FEWEST_PIECES])
    model = models.BPE(
        vocab={piece: number for number, piece in enumerate(pieces)},
        merges=[(piece[0], piece[1]) for piece in MERGED],
        ignore_merges=True,  # a whole piece is not composed of others
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and its settings (with chat template) into ``folder``, for all libraries to read alike."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_max_length": max_length,
        "bos_token": None,
        "eos_token": STOP_TOKEN,
        "pad_token": PAD_TOKEN,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    read_as_written(folder)
