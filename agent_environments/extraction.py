"""The code in an assistant message.

Actions are free text with fenced blocks. Only blocks whose fence names the language (```` ```python ```` or
```` ```py ````) are code; the rest of the message is the agent's thought. A block may be indented as a whole, as in a
list, and may stand on one line: ```` ```python print(1)``` ````.
"""

from __future__ import annotations

import re
import textwrap

_OPENING = re.compile(r"```(?:python|py)(?:[ \t]*(?:\r?\n|\Z)|[ \t]+(?P<line>[^\s`][^\r\n]*?)```)")
# A closing fence stands at the start or at the end of its line, so that ``` inside a string does not end the block.
_CLOSING = re.compile(r"^[ \t]*```|```[ \t]*$", re.MULTILINE)


def code_blocks(action: str) -> list[str]:
    """Return the fenced python blocks of ``action``, in order; a last block without its closing fence counts."""
    blocks: list[str] = []
    position = 0
    while opening := _OPENING.search(action, position):
        if opening["line"] is not None:
            blocks.append(opening["line"].rstrip())
            position = opening.end()
            continue
        closing = _CLOSING.search(action, opening.end())
        end, position = closing.span() if closing else (len(action), len(action))
        block = action[opening.end() : end].strip("\r\n")
        # dedent also empties lines of white space, which a string of an ordinary block may hold.
        blocks.append(textwrap.dedent(block) if block[:1].isspace() else block)
    return blocks


def extract_code(action: str) -> str:
    """Join all python blocks of ``action`` to one program; "" if ``action`` has no blocks.

    The program gives one observation, and its first exception ends it.
    """
    return "\n".join(block for block in code_blocks(action) if block.strip())
