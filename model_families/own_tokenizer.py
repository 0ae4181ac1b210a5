"""Checks that a folder's tokenizer gives the same ids in transformers, and the cure where it does not.

transformers 5 takes the pre-tokenizer of some kinds of models (``model_type`` qwen2 and others) from its own code,
whatever the folder's ``tokenizer.json`` says. Of the published models the two are the same. A tokenizer of one's own in
such a folder has other ids in transformers, and so in a plain vLLM server.
"""

from __future__ import annotations

import json
from pathlib import Path

from model_families.chat.tokenizer import read_tokenizer

MODULE = "own_tokenizer"
CODE = f"{MODULE}.py"
_CODE = '''"""The tokenizer of this folder is the one in tokenizer.json, and no other of the same kind of model."""

from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    """Encodes as tokenizer.json says."""
'''
SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "auto_map": {"AutoTokenizer": [None, f"{MODULE}.OwnTokenizer"]},
}
"""Keys of tokenizer_config.json with which transformers 5 builds no tokenizer of its own; it reads the module only
where it may trust a folder's code, and else ``tokenizer.json`` alone."""
_TEXTS = (
    "Hello, world! How are you today?",
    "print(apis.spotify.login(username='joe@mail.com', password='x_1'))",
    "def add(a: int, b: int) -> int:\n    return a + b\n\n\nadd(10, 20_000)",
    "```python\nfor i in range(1234567):\n\tprint(f'{i:>8}')\n```\n",
    '{"name": "search", "arguments": {"query": "a \\"quoted\\" word", "limit": 5}}',
    "<tool_call>\n{}\n</tool_call>",
    "  leading, trailing and   inner spaces  ",
    "\n\n \n\t\r\n",
    "It's we'll they'RE I'd DON'T",
    "Grüße, naïve café; e\u0301 and \u00e9",
    "你好，世界。こんにちは 안녕하세요",
    "Привет, мир! שלום مرحبا",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \u00a0\u3000\ufeff",
    "3.14159 1,000,000 0x7fff 1e-5 2026-11-28T04:05:06Z",
    "https://example.org/a/b?c=d&e=%20f#g",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "CamelCaseName snake_case_name kebab-case-name SCREAMING_CASE",
    "x" * 60 + " " * 30 + "-" * 40,
    "$\\frac{1}{2}$ <b>&amp;</b> a != b && c <= d",
    "1. First\n2. Second\n   - third\n",
)


def differing_ids(folder: str | Path) -> str | None:
    """Compare the ids of twenty texts from ``tokenizers``, which we train and serve with, and from transformers.

    Returns:
        The difference in one line; None if there is no difference, or no ``tokenizer.json`` in the folder.
    """
    if not (Path(folder) / "tokenizer.json").is_file():
        return None
    from transformers import AutoTokenizer  # takes a second

    own = read_tokenizer(folder)
    own.no_truncation()
    own.no_padding()
    try:
        theirs = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # whatever the many kinds of tokenizers raise
        return f"transformers cannot read the tokenizer in {folder}: {' '.join(str(error).split())[:200]}"
    words = [str(token) for token in own.get_added_tokens_decoder().values()]
    texts = [*_TEXTS, "a".join(words[:8])]
    wrong = [
        text
        for text in texts
        if own.encode(text, add_special_tokens=False).ids != theirs(text, add_special_tokens=False)["input_ids"]
    ]
    if not wrong:
        return None
    return (
        f"transformers, and so a plain vLLM server, gives {len(wrong)} of {len(texts)} texts other ids than the "
        f"tokenizer.json in {folder} says"
    )


def read_as_written(folder: Path) -> None:
    """Add :data:`SETTINGS` and :data:`CODE` to ``folder``: they make transformers use ``tokenizer.json`` unchanged."""
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    file.write_text(json.dumps(settings | SETTINGS, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / CODE).write_text(_CODE, encoding="utf-8")
