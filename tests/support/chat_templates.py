"""Chat templates of today's families, told in our own words: the form is theirs, no text of them is kept here.

Each is a template of the folder ``chat_templates`` and the control tokens that its tokenizer has, the first and second
of which begin and end a text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from support.chat_tokenizers import LLAMA3_SPECIAL, QWEN3_ADDED, QWEN3_SPECIAL, template_text, write_small


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


_QWEN = ("<|endoftext|>", "<|im_end|>", "<|im_start|>", *QWEN3_SPECIAL[3:])
_GEMMA = ("<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>")
_MISTRAL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"),
)
FORMS = {
    "Gemma 2": Form("gemma2", _GEMMA),
    "Gemma 3": Form("gemma3", _GEMMA, added=("\n\n", "\n\n\n")),
    "Gemma 4": Form(
        "gemma4",
        (
            *("<bos>", "<eos>", "<pad>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
            *("<|tool_response>", "<tool_response|>", '<|"|>', "<|channel>", "<channel|>", "<|think|>"),
            *("<|image>", "<|image|>", "<image|>"),
        ),
        ends=("<eos>", "<turn|>", "<|tool_response>"),
        native=True,
    ),
    "gpt-oss": Form(
        "gpt_oss",
        ("<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
        thinking="kept",
    ),
    "SmolLM3": Form(
        "smollm3", ("<|begin_of_text|>", "<|im_end|>", "<|im_start|>"), ("<think>", "</think>"), thinking="kept"
    ),
    "Granite 4": Form(
        "granite4",
        ("<|fim|>", "<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
        ("<tool_call>", "</tool_call>"),
        native=True,
    ),
    "LFM2": Form("lfm2", ("<|startoftext|>", "<|im_end|>", "<|im_start|>", "<|tool_call_start|>")),
    "ChatML": Form("chatml", _QWEN[:3]),
    "Qwen2.5": Form("qwen2_5", _QWEN, tuple(QWEN3_ADDED[:-4]), native=True),
    "Qwen3": Form("qwen3", _QWEN, tuple(QWEN3_ADDED), thinking="kept", role="tool", native=True),
    "Qwen3.5": Form("qwen3_5", _QWEN, tuple(QWEN3_ADDED), thinking="kept", role="tool", native=True),
    "Llama 3.1": Form("llama3_1", tuple(LLAMA3_SPECIAL), native=True),
    "GLM-4.5": Form(
        "glm4_5",
        ("[gMASK]", "<|endoftext|>", "<sop>", "<|user|>", "<|system|>", "<|assistant|>", "<|observation|>"),
        (*QWEN3_ADDED[-4:], "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
        thinking="kept",
        native=True,
        role="tool",
    ),
    "Mistral": Form("mistral", _MISTRAL, native=True),
    "Mistral, calls by name": Form("mistral_named", (*_MISTRAL, "[ARGS]"), native=True),
    "Mistral before": Form("mistral_before", ("<s>", "</s>", "[INST]", "[/INST]")),
    "Phi": Form("phi", ("<|endoftext|>", "<|end|>", "<|user|>", "<|system|>", "<|assistant|>")),
    "GLM-4": Form(
        "glm4", ("[gMASK]", "<|endoftext|>", "<sop>", "<|user|>", "<|system|>", "<|assistant|>", "<|observation|>")
    ),
    "OLMo": Form("olmo", ("<|endofprompt|>", "<|endoftext|>", "<|user|>", "<|system|>", "<|assistant|>")),
}
"""By the name of a family, what is opened."""
