"""Chat templates of today's families, told in our own words: the form is theirs, no text of them is kept here.

Each is a template and the control tokens that its tokenizer has, the first and second of which begin and end a text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from support.chat_tokenizers import QWEN3_ADDED, QWEN3_SPECIAL, write_small

_ROLE = "{%- set role = 'model' if m.role == 'assistant' else m.role %}"
_HERMES = (
    "{%- for c in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first else '' }}"
    '{{ \'<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' + c.function.arguments | tojson }}'
    "{{ '}\\n</tool_call>' }}{%- endfor %}"
)


@dataclass(frozen=True)
class Form:
    """A template and its tokenizer's words; ``name``: of the format that it is opened as."""

    template: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    name: str = "template"
    thinking: str | None = None
    native: bool = False
    role: str = "user"

    def write(self, folder: Path) -> Path:
        """A folder with the tokenizer and the template."""
        write_small(folder, "AnyForCausalLM", self.special, self.added)
        words = {"bos_token": self.special[0], "eos_token": self.special[1], "pad_token": self.special[1]}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": self.template, **words}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder


def _turns(before: str, header: str, end: str, ask: str, within: str = "m.content") -> str:
    return (
        before
        + "{%- for m in messages %}{{ "
        + header
        + " }}{{ "
        + within
        + " }}{{ '"
        + end
        + "' }}{%- endfor %}{%- if add_generation_prompt %}{{ '"
        + ask
        + "' }}{%- endif %}"
    )


GEMMA3 = (
    "{{ bos_token }}{%- set own = namespace(text='', first=true) %}"
    "{%- if messages[0].role == 'system' %}{%- set own.text = messages[0].content + '\\n\\n' %}{%- endif %}"
    "{%- for m in messages if m.role != 'system' %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}"
    + _ROLE
    + "{{ '<start_of_turn>' + role + '\\n' + (own.text if own.first else '') }}{%- set own.first = false %}"
    "{{ m.content | trim + '<end_of_turn>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{%- endif %}"
)
GEMMA2 = "{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{%- endif %}" + GEMMA3
GEMMA4 = (
    "{{ bos_token }}{%- for m in messages %}"
    + _ROLE
    + "{{ '<|turn>' + role + '\\n' + m.content | trim + '<turn|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|turn>model\\n' }}{%- endif %}"
)
HARMONY = (
    "{{ '<|start|>system<|message|>Reasoning: medium' + '<|end|>' }}"
    "{%- for m in messages %}"
    "{%- if m.role == 'system' %}{{ '<|start|>developer<|message|># Instructions\\n\\n' + m.content + '<|end|>' }}"
    "{%- elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- if loop.last and m.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{%- endif %}"
)
SMOLLM3 = (
    "{%- set thinks = enable_thinking is not defined or enable_thinking %}"
    "{%- set given = messages[0].content if messages[0].role == 'system' else 'None.' %}"
    "{{ '<|im_start|>system\\nReasoning Mode: ' }}"
    "{{ ('/think' if thinks else '/no_think') + '\\n\\n' + given + '<|im_end|>\\n' }}"
    "{%- for m in messages if m.role != 'system' %}"
    "{{ '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' and not thinks %}{{ '<think>\\n\\n</think>\\n' + m.content.lstrip('\\n') }}"
    "{%- else %}{{ m.content }}{%- endif %}{{ '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{{ '' if thinks else '<think>\\n\\n</think>\\n' }}{%- endif %}"
)
GRANITE4 = (
    "{%- if tools or messages[0].role == 'system' %}{{ '<|start_of_role|>system<|end_of_role|>' }}"
    "{{ messages[0].content if messages[0].role == 'system' else '' }}"
    "{%- if tools %}{{ '\\nTools:' }}{%- for t in tools %}{{ '\\n' + t | tojson }}{%- endfor %}{%- endif %}"
    "{{ '<|end_of_text|>\\n' }}{%- endif %}"
    "{%- for m in messages if m.role != 'system' %}"
    "{%- if m.role == 'tool' %}"
    "{%- if loop.previtem.role != 'tool' %}{{ '<|start_of_role|>user<|end_of_role|>' }}{%- endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|end_of_text|>\\n' }}{%- endif %}"
    "{%- else %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content }}"
    + _HERMES
    + "{{ '<|end_of_text|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"
)
LFM2 = (
    "{{ bos_token }}{%- if tools %}{{ '<|im_start|>system\\nList of tools: ' + tools | tojson + '<|im_end|>\\n' }}"
    "{%- endif %}"
    + _turns(
        "",
        "'<|im_start|>' + m.role + '\\n'",
        "<|im_end|>\\n",
        "<|im_start|>assistant\\n",
        "m.content if not m.tool_calls else '<|tool_call_start|>[' + m.tool_calls[0].function.name + '()]'",
    )
)
QWEN3_5 = (
    "{%- set asked = namespace(last=-1) %}"
    "{%- for m in messages if m.role == 'user' %}{%- set asked.last = loop.index0 %}{%- endfor %}"
    "{%- set at = namespace(user=-1) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set at.user = at.user + 1 %}{%- endif %}"
    "{%- if m.role == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + m.content | trim + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' and at.user == asked.last %}"
    "{{ '<think>\\n' + (m.reasoning_content or '') | trim + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{ m.content | trim + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{{ '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false else '<think>\\n' }}"
    "{%- endif %}"
)
MISTRAL = (
    "{{ bos_token }}{%- for m in messages %}"
    "{%- if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}"
    "{%- elif m.role == 'user' %}{%- if tools and loop.index0 <= 1 %}"
    "{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{ '[INST]' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{%- elif m.tool_calls %}{{ '[TOOL_CALLS][' }}{%- for c in m.tool_calls %}"
    '{{ \'{"name": "\' + c.function.name + \'", "arguments": \' + c.function.arguments | tojson }}'
    "{{ ', \"id\": \"' + c.id + '\"}' + ('' if loop.last else ', ') }}{%- endfor %}{{ ']' + eos_token }}"
    "{%- else %}{{ m.content + eos_token }}{%- endif %}{%- endfor %}"
)
SYSTEM_WITH_THE_LAST = (
    "{{ bos_token }}{%- for m in messages if m.role != 'system' %}{%- if m.role == 'user' %}{{ '[INST]' }}"
    "{%- if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{%- endif %}"
    "{{ m.content + '[/INST]' }}{%- else %}{{ m.content + eos_token }}{%- endif %}{%- endfor %}"
)
"""As an earlier Mistral's: the system message moves to the last question, so that no history stays as it was."""
PHI = (
    "{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{%- endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt else eos_token }}"
)
GLM4 = (
    "{{ '[gMASK]<sop>' }}{%- for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{%- endif %}"
)
OLMO = _turns("{{ bos_token }}", "'<|' + m.role + '|>\\n'", "<|endoftext|>\\n", "<|assistant|>\\n")
LLAMA2 = (
    "{%- for m in messages %}{%- if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{%- elif m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}{%- endif %}{%- endfor %}"
)

_GEMMA = ("<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>")
FORMS = {
    "Gemma 2": Form(GEMMA2, _GEMMA),
    "Gemma 3": Form(GEMMA3, _GEMMA, added=("\n\n", "\n\n\n")),
    "Gemma 4": Form(GEMMA4, ("<bos>", "<eos>", "<pad>", "<|turn>", "<turn|>")),
    "gpt-oss": Form(
        HARMONY,
        ("<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
        thinking="kept",
    ),
    "SmolLM3": Form(
        SMOLLM3, ("<|begin_of_text|>", "<|im_end|>", "<|im_start|>"), ("<think>", "</think>"), thinking="kept"
    ),
    "Granite 4": Form(
        GRANITE4,
        ("<|fim|>", "<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
        ("<tool_call>", "</tool_call>"),
        native=True,
    ),
    "LFM2": Form(LFM2, ("<|startoftext|>", "<|im_end|>", "<|im_start|>", "<|tool_call_start|>")),
    "Qwen3.5": Form(QWEN3_5, tuple(QWEN3_SPECIAL), tuple(QWEN3_ADDED), name="qwen3_5", thinking="kept", role="tool"),
    "Mistral": Form(
        MISTRAL,
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]"),
            *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"),
        ),
        native=True,
    ),
    "Mistral before": Form(SYSTEM_WITH_THE_LAST, ("<s>", "</s>", "[INST]", "[/INST]")),
    "Phi": Form(PHI, ("<|endoftext|>", "<|end|>", "<|user|>", "<|system|>", "<|assistant|>")),
    "GLM-4": Form(
        GLM4, ("[gMASK]", "<|endoftext|>", "<sop>", "<|user|>", "<|system|>", "<|assistant|>", "<|observation|>")
    ),
    "OLMo": Form(OLMO, ("<|endofprompt|>", "<|endoftext|>", "<|user|>", "<|system|>", "<|assistant|>")),
}
"""By the name of a family, what is opened."""
