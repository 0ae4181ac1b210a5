"""The chat APIs that clients speak, a file each: a dialect reads a call, and writes its answer or its refusal."""

from rollout_server.endpoint.dialects.anthropic import Anthropic
from rollout_server.endpoint.dialects.chat import Chat
from rollout_server.endpoint.dialects.completions import Completions
from rollout_server.endpoint.dialects.dialect import Dialect
from rollout_server.endpoint.dialects.responses import Responses

CHAT = Chat()
ANTHROPIC = Anthropic()
DIALECTS: tuple[Dialect, ...] = (CHAT, Responses(), ANTHROPIC, Completions())

__all__ = ["ANTHROPIC", "CHAT", "DIALECTS", "Dialect"]
