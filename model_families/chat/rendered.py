"""Chat formats that the package ``renderers`` writes: a row for each family, and the same class for all."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_environments.tool_calls import CALL_OPENS
from model_families.chat.calls import rendered_call, unread_call
from model_families.chat.control import ControlledFormat
from model_families.chat.format import ObservationRole, ReadTurn, Thinking
from model_families.chat.messages import (
    THOUGHT_CLOSES,
    THOUGHT_OPENS,
    ChatMessage,
    Tools,
    as_texts,
    split_thought,
    spoken_message,
)
from model_families.chat.template import ChatTemplate


@dataclass(frozen=True)
class KnownRenderer:
    """The renderer of a family in the package ``renderers``.

    ``module`` and ``renderer`` name its class, ``turn_end`` is the word that ends a whole turn, ``pad`` that of the
    padding. ``thinks``: its models can think. ``hermes``: its calls are written as in
    :mod:`agent_environments.tool_calls`, so that a sampled text is read as it is. ``one_call``: a turn holds no more.
    ``header`` is the word that begins a turn, which ends the one before when it is sampled.
    """

    module: str
    renderer: str
    turn_end: str
    pad: str
    header: str
    thinks: bool = False
    hermes: bool = False
    one_call: bool = False


RENDERERS = {
    "qwen3": KnownRenderer("qwen3", "Qwen3", "<|im_end|>", "<|endoftext|>", "<|im_start|>", thinks=True, hermes=True),
    "llama3": KnownRenderer("llama_3", "Llama3", "<|eot_id|>", "<|end_of_text|>", "<|start_header_id|>", one_call=True),
    "qwen3_5": KnownRenderer("qwen35", "Qwen35", "<|im_end|>", "<|endoftext|>", "<|im_start|>", thinks=True),
    "glm4_5": KnownRenderer("glm45", "GLM45", "<|user|>", "<|endoftext|>", "<|assistant|>", thinks=True),
    "gemma4": KnownRenderer("gemma4", "Gemma4", "<turn|>", "<pad>", "<|turn>"),
}


def _thinking(family: KnownRenderer, model_dir: str | Path, asked: Thinking | None) -> tuple[Thinking | None, bool]:
    """Return how the model in ``model_dir`` thinks, and whether it always does: its prompt begins its thinking then.

    Models of one family may think by choice, always or never, and their templates tell them apart.
    """
    template = ChatTemplate(model_dir)
    if not family.thinks or (template.text is not None and THOUGHT_CLOSES not in template.text):
        if asked is not None:
            raise ValueError(f"the model in {model_dir} does not think: leave model.thinking null, not {asked}")
        return None, False
    always = _ends(template, THOUGHT_OPENS) and _ends(template, THOUGHT_OPENS, enable_thinking=False)
    if always and asked == "off":
        raise ValueError(f"the model in {model_dir} always thinks: model.thinking must be kept or stripped")
    return asked or ("off" if _ends(template, THOUGHT_CLOSES) else "kept"), always


def _ends(template: ChatTemplate, word: str, **settings: Any) -> bool:
    """Whether a prompt ends with ``word``, which begins or ends the model's thinking for it."""
    try:
        return template.render([{"role": "user", "content": "x"}], **settings).rstrip().endswith(word)
    except ValueError:
        return False


class Rendered(ControlledFormat):
    """One of :data:`RENDERERS`.

    Args:
        model_dir: folder that holds the policy's ``tokenizer.json``.
        name: of the family.
        thinking: None is "kept" where the model thinks.
        observation_role: None is "tool" where thinking is kept, because models' own templates keep it there, and
            "user" elsewhere.

    Raises:
        ValueError: no tokenizer of this family, one in which text could forge a control token, or a way of thinking
            that the family does not have.
    """

    def __init__(
        self,
        model_dir: str | Path,
        name: str,
        thinking: Thinking | None = None,
        observation_role: ObservationRole | None = None,
    ):
        family = RENDERERS[name]
        self.name = name  # type: ignore[misc]  # of this one
        self._family = family
        self.thinking, always = _thinking(family, model_dir, thinking)
        self.observation_role = observation_role or ("tool" if self.thinking == "kept" else "user")
        if self.thinking == "stripped" and self.observation_role == "tool":
            raise ValueError("model.thinking stripped needs model.observation_role user: before results it is kept")
        super().__init__(model_dir)
        self.turn_end, self.pad_id = self._id(family.turn_end), self._id(family.pad)
        self._renderer = self._build()
        ends = [self.turn_end, *self._renderer.get_stop_token_ids(), self._id(family.header)]
        self.stop_ids = tuple(dict.fromkeys(ends))
        if self.thinking is not None:
            self._closes, self._tool_call = self._id(THOUGHT_CLOSES), self._id(CALL_OPENS)
            self.thinking_ends = (self._closes, self._tool_call)
        begins = self._control.encode(f"{THOUGHT_OPENS}\n")
        prompt = self._renderer.render_ids([{"role": "user", "content": "x"}], add_generation_prompt=True)
        self._begins = [] if not always or prompt[-len(begins) :] == begins else begins

    def _build(self) -> Any:
        # Imported only where it is needed: it takes a second.
        module = importlib.import_module(f"renderers.{self._family.module}")
        settings: dict[str, Any] = {}
        if self._family.thinks:
            retention = "tool_cycle" if self.thinking == "stripped" else "all"
            settings = {"enable_thinking": self.thinking != "off", "thinking_retention": retention}
        config = getattr(importlib.import_module("renderers.configs"), f"{self._family.renderer}RendererConfig")
        try:
            return getattr(module, f"{self._family.renderer}Renderer")(self._control, config(**settings))
        except AssertionError as error:
            raise ValueError(f"{self._file} does not fit chat format {self.name}: {error}") from error

    def opening(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> list[int]:
        given = [self._given(message, bool(tools)) for message in messages]
        rendered = self._renderer.render_ids(given, tools=self._offered(tools), add_generation_prompt=True)
        return [*rendered, *self._begins]

    def spoken(self, action: str, tools: Tools, reasoning: str = "") -> list[int]:
        message = spoken_message(action, bool(tools), reasoning)
        if not (message.calls or reasoning):
            return [*self.encode_text(action), self.turn_end]
        asked = {"role": "user", "content": "x"}
        before = [*self._renderer.render_ids([asked], add_generation_prompt=True), *self._begins]
        # Thinking stands in the last turn whatever becomes of it later; without any, an empty one may stand there.
        after = [] if reasoning else [asked]
        whole = self._renderer.render_ids([asked, self._given(message, bool(tools)), *after])
        pairs = enumerate(zip(before, whole, strict=False))
        start = next((place for place, (one, other) in pairs if one != other), len(before))
        turn = [*whole[start:], self.turn_end]
        return turn[: turn.index(self.turn_end) + 1]

    def aside(self, text: str) -> list[int]:
        return list(self._renderer.render_ids([{"role": "system", "content": self._control.shield(text)}]))

    def extension(
        self, prompt: Sequence[int], sampled: Sequence[int], messages: Sequence[ChatMessage], tools: Tools = ()
    ) -> list[int] | None:
        given = [self._given(message, bool(tools)) for message in messages]
        served = [*prompt, *sampled]
        grown = self._renderer.bridge_to_next_turn(list(prompt), list(sampled), given, tools=self._offered(tools))
        if grown is None or grown.token_ids[: len(served)] != served:
            return None
        return [*grown.token_ids[len(served) :], *self._begins]

    def _given(self, message: ChatMessage, with_tools: bool) -> dict[str, Any]:
        if message.role == "assistant" and not message.calls:  # written as one text
            reasoning, content = message.reasoning, message.content
            if self.thinking is not None and not reasoning:
                reasoning, content, _ = split_thought(content)
            message = spoken_message(content, with_tools, reasoning)
        if len(message.calls) > 1 and self._family.one_call:  # as the policy wrote them, which is no form of its own
            [(_, text)] = as_texts([message], ())
            message = ChatMessage("assistant", text)
        given: dict[str, Any] = {"role": message.role, "content": self._control.shield(message.content)}
        if message.reasoning:
            given["reasoning_content"] = self._control.shield(message.reasoning)
        if message.calls:
            calls = [{"name": call.name, "arguments": call.arguments} for call in message.calls]
            given["tool_calls"] = [{"type": "function", "function": self._control.shield(call)} for call in calls]
        return given

    def _offered(self, tools: Tools) -> Any:
        return self._control.shield(list(tools)) if tools else None

    def read(self, prompt: Sequence[int], sampled: Sequence[int], with_tools: bool) -> ReadTurn:
        body = self.without_stop(sampled)
        if self.thinking is None:
            return ReadTurn(self._answer(body, with_tools))
        from renderers.reasoning import scan_reasoning

        found = scan_reasoning(
            self._control,
            body,
            prompt_ids=list(prompt),
            stop_ids=set(self._renderer.get_stop_token_ids()),  # a header is none: the prompt ends in one
            tool_start_id=self._tool_call,
            tool_start_closes_reasoning=True,
        )
        if found.text is None:
            return ReadTurn(self._answer(body, with_tools))
        reasoning = found.text.strip("\n")
        if found.is_open:
            return ReadTurn("", reasoning, len(body), cut_in_thinking=True)
        ends = body.index(self._tool_call) if found.closed_by_tool else body.index(self._closes) + 1
        return ReadTurn(self._answer(body[ends:], with_tools).lstrip("\n"), reasoning, ends)

    def _answer(self, body: list[int], with_tools: bool) -> str:
        """The text of ``body``, its calls in the form that environments read."""
        text = self.decode(body)
        if self._family.hermes or not with_tools:
            return text
        try:
            found = self._renderer.parse_response(body)
            blocks = [rendered_call(call.name, call.arguments, call.raw) for call in found.tool_calls]
        except (ValueError, RecursionError):  # JSON that Python cannot read, or not write again
            return unread_call(text.strip())
        return "\n".join(part for part in (found.content, *blocks) if part) if blocks else text
