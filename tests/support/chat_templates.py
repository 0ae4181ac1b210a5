"""Chat templates of today's families, told in our own words: the form is theirs, no text of them is kept here.

Each is a template of the folder ``chat_templates`` and the control tokens that its tokenizer has, the first and second
of which begin and end a text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from support.chat_tokenizers import template_text, write_small
from support.texts import texts_beside


@dataclass(frozen=True)
class Form:
    """A template, by its name or as a text, and its tokenizer's words, of which ``ends`` end what is generated."""

    template: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    thinking: str | None = None
    native: bool = False
    role: str = "user"

    def write(self, folder: Path) -> Path:
        """A folder with the tokenizer and the template."""
        write_small(folder, "AnyForCausalLM", self.special, self.added)
        template = self.template if "{" in self.template else template_text(self.template)
        words = {"bos_token": self.special[0], "eos_token": self.special[1], "pad_token": self.special[1]}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **words}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        if self.ends:
            added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
            ends = [token["id"] for token in added if token["content"] in self.ends]
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        return folder


FORMS = {
    name: Form(**{key: tuple(value) if isinstance(value, list) else value for key, value in form.items()})
    for name, form in texts_beside(__file__).items()
}
"""By the name of a family, what is opened."""
