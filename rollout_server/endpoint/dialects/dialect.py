"""The base class of dialects, and their common parts.

Answers are plain data: the classes of OpenAI's and Anthropic's packages read them in the tests, and the node need not
import those.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from loop_plumbing.http_server import read_agents_json
from model_families.chat.messages import results_by_call
from rollout_server.endpoint.messages import BadMessages, check_tools
from rollout_server.endpoint.wire import MODEL, Answer, ApiError, Asked, Choice, Recalled

MAX_STOPS = 16
MODEL_CHARACTERS = 200
"""Most characters of a model's name, which is kept with each answer, and stands in each event of a stream."""
NO_PREFILL = "messages: a prefill is refused: a turn cannot be begun here; end with what the user or a tool says"
"""A policy's turn is sampled as a whole, so that each of its tokens is its own."""
MAX_CHOICES = 8
TURN_ID = r"[0-9a-f]{1,32}_\d{1,9}"
"""A pattern of the ids of turns."""
WISHES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "reasoning_effort",
    "reasoning",
    "thinking",
    "parallel_tool_calls",
    "top_logprobs",
    "truncation",
    "context_management",
    "mcp_servers",
)
"""Fields of a request, in whatever dialect, that are recorded and not applied."""

Recall = Callable[[str], "Recalled | None"]
"""Finds an earlier turn of the episode by its id."""


class RequestBody(BaseModel):
    """The request fields that all dialects have. Other fields have no effect; some of them are recorded."""

    model_config = ConfigDict(extra="allow")

    model: Annotated[str, AfterValidator(lambda name: name[:MODEL_CHARACTERS])] = MODEL
    stream: bool | None = None
    tool_choice: str | dict[str, Any] | None = None

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read a request. Raises BadBody, or ApiError (400) if the JSON is not a request."""
        try:
            return cls.model_validate(read_agents_json(body))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            raise ApiError(400, "invalid_request", f"{where}: {first['msg']}") from error

    def settings(self, **more: Any) -> dict[str, Any]:
        """Return the request's settings. ``more`` holds settings with another form in this dialect; None is unset."""
        extra = self.model_extra or {}
        named = {name: extra[name] for name in WISHES if extra.get(name) is not None}
        if self.tool_choice not in (None, "auto", {"type": "auto"}):
            named["tool_choice"] = self.tool_choice
        return named | {name: value for name, value in more.items() if value is not None}


class Dialect(ABC):
    """A chat API.

    Attributes:
        alive: an event that keeps a stream alive until the answer comes; clients ignore it.
    """

    alive: bytes = b": the policy is speaking\n\n"

    def read(self, body: bytes, recall: Recall) -> Asked:
        """Return the call that a request makes.

        Raises:
            BadBody: the body is not JSON.
            ApiError: the body is not a request, or asks for something that the policy cannot do.
        """
        try:
            asked = self._read(body, recall)
        except BadMessages as error:
            raise ApiError(400, "invalid_request", str(error)) from error
        return replace(asked, conversation=tuple(results_by_call(asked.conversation)))

    @abstractmethod
    def _read(self, body: bytes, recall: Recall) -> Asked:
        """Return the call like :meth:`read`; may also raise BadMessages."""

    @abstractmethod
    def whole(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        """Return the body of the answer to a call that does not stream."""

    @abstractmethod
    def events(self, asked: Asked, answer: Answer) -> Iterator[bytes]:
        """Yield the answer to a call that streams, as server-sent events."""

    def counted(self, tokens: int) -> dict[str, Any]:
        """Return the answer that states the number of tokens of a call."""
        return {"input_tokens": tokens}

    def refusal(self, error: ApiError) -> dict[str, Any]:
        """Return the body of a refusal; the default has OpenAI's shape."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(error.status, "invalid_request_error")
        kind = "server_error" if error.status >= 500 else kind
        return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}

    def failure(self, error: ApiError) -> bytes:
        """Return the event that reports a refusal in a stream that has begun."""
        return event(self.refusal(error))


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """Return the bytes of a server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json.dumps(data).encode() + b"\n\n"


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """Return a call's arguments as the text that is sent to the client."""
    return json.dumps(arguments, ensure_ascii=False)


def token_logprobs(choice: Choice) -> list[dict[str, Any]]:
    """Return the sampled tokens in OpenAI's form: text, bytes where the text is whole characters, log-prob."""
    return [
        {
            "token": text,
            "logprob": logprob,
            "bytes": None if "\ufffd" in text else list(text.encode("utf-8", "surrogatepass")),
            "top_logprobs": [],
        }
        for text, logprob in choice.tokens
    ]


def function_tool(name: str, description: object, parameters: object) -> dict[str, Any]:
    """Return a tool in the form that the policy gets."""
    fields = {"description": description, "parameters": parameters}
    return {"type": "function", "function": {"name": name, **{key: value for key, value in fields.items() if value}}}


@dataclass(frozen=True)
class OfferedTools:
    """The tools of a request.

    ``offered`` are the tools that the policy gets, in the policy's form. ``loadable`` are, by name, tools that the
    policy gets once the agent refers to them. ``others`` names, as a setting, the kinds of tools that only the API's
    maker can run: the policy does not get such tools.
    """

    offered: list[dict[str, Any]]
    loadable: dict[str, dict[str, Any]]
    others: str | None


def offered_tools(
    tools: Iterable[dict[str, Any]], kind: str, default: str | None, parameters: str, agent_searches: bool
) -> OfferedTools:
    """Read the tools of a request.

    Args:
        kind: the kind of tools that the agent runs itself; ``default`` is the kind of a tool that states no kind.
        parameters: the key that holds a tool's JSON schema.
        agent_searches: the agent itself searches for tools to load later. If it is False, the API's maker would search,
            and such tools are offered at once.

    Raises:
        BadMessages: a tool has no name, or cannot be written for the policy.
    """
    offered, loadable, others = [], dict[str, dict[str, Any]](), set()
    for number, tool in enumerate(tools):
        if (of := tool.get("type", default)) != kind:
            others.add(str(of))
        elif isinstance(name := tool.get("name"), str):
            function = function_tool(name, tool.get("description"), tool.get(parameters))
            if tool.get("defer_loading") is True and agent_searches:
                loadable[name] = function
            else:
                offered.append(function)
        else:
            raise BadMessages(f"tools.{number}: a tool has a name and {parameters}")
    check_tools([*offered, *loadable.values()])
    return OfferedTools(offered, loadable, ", ".join(sorted(others)) or None)
