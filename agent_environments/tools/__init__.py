"""Tools, replies and rewards that are plain functions, behind the environment protocol."""

from agent_environments.tools.function_tool import tool
from agent_environments.tools.reply import reply
from agent_environments.tools.reward import reward

__all__ = ["reply", "reward", "tool"]
