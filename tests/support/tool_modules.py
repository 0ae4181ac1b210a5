"""Modules as users of `agent_environments.tools` write them, for tests."""

from pathlib import Path

import yaml

_TEXTS = {name: f"\n{text}" for name, text in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()}
SUMS, COUNTER, PRODUCTS = (_TEXTS["sums"], _TEXTS["counter"], _TEXTS["products"])


def call(name, /, **arguments):
    """An assistant's turn that makes one call."""
    from agent_environments.tool_calls import ToolCall, render_tool_call

    return render_tool_call(ToolCall(name, arguments))


def write(folder, source, name="mine"):
    """Path of a module with this text."""
    file = folder / f"{name}.py"
    file.write_text(source)
    return str(file)
