"""ChatML, as in Qwen2.5 and SmolLM2, written here: the reference that the other formats are held against.

The rollout node builds every prompt here and the supervised recipe builds its demonstrations here, so both see the same
ids. Text is encoded with the parsing of special tokens switched off. An observation that holds the letters
``<|im_end|>`` becomes ordinary tokens and cannot close its turn or forge another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from agent_environments.tool_calls import ToolCall
from model_families.chat.control import MARK, Shield, check_control, is_control
from model_families.chat.format import ChatFormat, ObservationRole, ReadTurn, Thinking
from model_families.chat.messages import ChatMessage, Tools, as_texts
from model_families.chat.template import ChatTemplate
from model_families.chat.tokenizer import read_tokenizer

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"


class ChatML(ChatFormat):
    """The policy's tokenizer, with ChatML around it.

    Args:
        model_dir: folder that holds the policy's ``tokenizer.json``.

    Attributes:
        im_start, im_end: ids of the two ChatML marks.

    Where a conversation has no system message and the folder's template writes one of its own, as Qwen2.5's does, it is
    written here. The stop ids are ``<|im_end|>``, ``<|im_start|>`` and ``<|endoftext|>``, Qwen's padding.

    Raises:
        ValueError: no ``tokenizer.json`` or a damaged one, a missing ChatML token, a tokenizer in which text can
            spell one, or one whose ordinary text has other ids without its added tokens.
    """

    name = "chatml"

    def __init__(
        self, model_dir: str | Path, thinking: Thinking | None = None, observation_role: ObservationRole | None = None
    ):
        if thinking is not None:
            raise ValueError(f"chat format {self.name} does not think: leave model.thinking null, not {thinking}")
        self.observation_role = observation_role or "user"
        file = Path(model_dir) / "tokenizer.json"
        tokenizer = read_tokenizer(model_dir)
        tokenizer.encode_special_tokens = True
        super().__init__(tokenizer)
        added = tokenizer.get_added_tokens_decoder().values()
        control = [token for token in added if is_control({"special": token.special, "content": token.content})]
        for token in control:
            check_control(file, token.content)
        self._shield = Shield(token.content for token in control if not token.special)
        known = {text: tokenizer.token_to_id(text) for text in (IM_START, IM_END, END_OF_TEXT)}
        ids = {text: token for text, token in known.items() if token is not None}
        missing = sorted(known.keys() - ids.keys())
        if missing:
            raise ValueError(f"{file} has no token {', '.join(missing)}, which chat format {self.name} needs")
        self._system = _own_system(model_dir)
        self.im_start, self.im_end, self.pad_id = ids[IM_START], ids[IM_END], ids[END_OF_TEXT]
        self.turn_end = self.im_end
        self.stop_ids = (self.im_end, self.pad_id, self.im_start)
        self._newline = self._encode("\n")
        self._assistant_header = [self.im_start, *self._encode("assistant\n")]
        forged = set(self._encode(f"{IM_START} {IM_END} {END_OF_TEXT}")) & set(self.stop_ids)
        if forged:
            raise ValueError(
                f"{file} does not mark {IM_START}, {IM_END}, {END_OF_TEXT} as special: text could forge turns"
            )

    def opening(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> list[int]:
        given = list(map(self._shielded, messages))
        if self._system is not None and (not given or given[0].role != "system"):
            given.insert(0, ChatMessage("system", self._system))
        return self._messages(as_texts(given, self._shield(tools)))

    def extension(
        self, prompt: Sequence[int], sampled: Sequence[int], messages: Sequence[ChatMessage], tools: Tools = ()
    ) -> list[int]:
        """A turn that did not end with ``<|im_end|>`` (token cap, another stop token) gets the mark, on which nobody
        trains."""
        ending = [] if sampled[-1] == self.im_end else [self.im_end]
        return [*ending, *self._newline, *self._messages(as_texts(list(map(self._shielded, messages)), ()))]

    def read(self, prompt: Sequence[int], sampled: Sequence[int], with_tools: bool) -> ReadTurn:
        return ReadTurn(self.decode(self.without_stop(sampled)))

    def aside(self, text: str) -> list[int]:
        return self.message("system", self._shield(text))

    def message(self, role: str, content: str) -> list[int]:
        """One whole message, with its header, its end and the newline after it."""
        return [self.im_start, *self._encode_again(f"{role}\n{content}"), self.im_end, *self._newline]

    def _shielded(self, message: ChatMessage) -> ChatMessage:
        """Only what a turn and a call are written with may become a token that is added, but not special."""
        if message.role != "assistant":
            return replace(message, content=self._shield(message.content))
        calls = (ToolCall(self._shield(call.name), self._shield(call.arguments)) for call in message.calls)
        return replace(message, calls=tuple(calls))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(token for part in text.split(MARK) for token in super(ChatML, self)._encode(part))

    def spoken(self, action: str, tools: Tools, reasoning: str = "") -> list[int]:
        if reasoning:
            raise ValueError(f"chat format {self.name} does not think")
        return [*self.encode_text(action), self.turn_end]

    def _messages(self, turns: Iterable[tuple[str, str]]) -> list[int]:
        return [token for role, text in turns for token in self.message(role, text)] + self._assistant_header


def _own_system(model_dir: str | Path) -> str | None:
    """The system message that the folder's template writes where a conversation has none."""
    try:
        text = ChatTemplate(model_dir).render([{"role": "user", "content": "x"}])
    except ValueError:
        return None  # there is no template, or it is of another form: see model_families.opening
    header = f"{IM_START}system\n"
    return text[len(header) : text.find(IM_END)] if text.startswith(header) and IM_END in text else None
