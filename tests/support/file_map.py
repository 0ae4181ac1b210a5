"""The file map of docs/development.md: every module with the first sentence of its docstring.

python tests/support/file_map.py        # writes the map anew
"""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
PAGE = CHECKOUT / "docs" / "file_map.md"
FOLDERS = (
    "recipes",
    "loop_formats",
    "model_families",
    "rollout_server",
    "agent_environments",
    "appworld_adapter",
    "benchmarks",
    "experiments",
)
HEAD = """# File map

```bash
python tests/support/file_map.py        # writes this page anew from the modules' docstrings
```

Each module with the first sentence of its docstring. [development.md](development.md) gives the reading order of one
iteration.
"""


def first_sentence(file: Path) -> str:
    """Of the module's docstring; empty where there is none."""
    text = " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0].split())
    end = text.find(". ")
    return (text if end < 0 else text[:end]).rstrip(".:")


def file_map() -> str:
    """The whole page."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *(f"{f}/*.py" for f in FOLDERS)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    lines, folder = [HEAD], None
    for name in sorted(set(listed), key=lambda name: (str(Path(name).parent), name)):
        file = CHECKOUT / name
        if not file.is_file() or not first_sentence(file):
            continue
        if file.parent != folder:
            folder = file.parent
            lines += ["", f"## `{folder.relative_to(CHECKOUT)}/`", "", "| module | |", "|---|---|"]
        lines.append(f"| `{file.name}` | {first_sentence(file).replace('|', '/')} |")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(file_map())
