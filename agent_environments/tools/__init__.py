"""Tools and rewards that are plain functions, behind the environment protocol."""

from agent_environments.tools.function_tool import tool
from agent_environments.tools.reward import reward

__all__ = ["reward", "tool"]
