"""The code in an assistant message.

Actions are free text with fenced blocks. Only blocks whose fence names the language (```` ```python ```` or
```` ```py ````) are code; the rest of the message is the agent's thought.
"""

from __future__ import annotations

import re

_OPENING = re.compile(r"```(?:python|py)[ \t]*(?:\r?\n|\Z)")
# A closing fence stands at the start or at the end of its line, so that ``` inside a string does not end the block.
_CLOSING = re.compile(r"^[ \t]*```|```[ \t]*$", re.MULTILINE)


def code_blocks(action: str) -> list[str]:
    """The fenced python blocks of ``action``, in order; a last block without its closing fence counts."""
    blocks: list[str] = []
    position = 0
    while opening := _OPENING.search(action, position):
        closing = _CLOSING.search(action, opening.end())
        end, position = closing.span() if closing else (len(action), len(action))
        blocks.append(action[opening.end() : end].strip("\r\n"))
    return blocks


def extract_code(action: str) -> str:
    """One program from all blocks of ``action``; "" if there are none.

    Several blocks run as one concatenated program: one observation, and the first exception ends it.
    """
    return "\n".join(block for block in code_blocks(action) if block.strip())
