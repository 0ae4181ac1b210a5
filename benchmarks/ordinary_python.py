"""Ordinary programs in the tool `python`: the same output as in plain Python, else it ends 1.

    python benchmarks/ordinary_python.py [--json [PATH]]

Each program of ordinary_programs.yaml runs by itself twice, in a new folder, under the interpreter of this script: as a
file of plain Python, and as one call of a session that may import the packages which the programs name. What needs a
package that is not installed here is named as not tried.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from agent_environments.tools.tool import ToolError
from loop_contrib.code_tool.python_tool import PythonSessions

DEADLINE_S = 60.0
LIMITS = {"memory_mb": 2048, "folder_mb": 64, "max_characters": 20_000, "deadline_s": DEADLINE_S}
VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "MPLBACKEND": "agg", "PYTHONHASHSEED": "0"}

PROGRAMS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("ordinary_programs.yaml").read_text())
PACKAGES = ("numpy", "pandas", "matplotlib", "scipy", "sklearn", "sympy", "PIL", "pyarrow", "yaml")


def needed(program: str) -> list[str]:
    """Return the packages that a program imports."""
    return [
        name
        for name in PACKAGES
        if f"import {name}" in program or f"from {name}" in program or f", {name}\n" in program
    ]


def plain(program: str) -> str:
    """Return what plain Python prints."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as home:
        file = Path(home, "program.py")
        file.write_text(program)
        done = subprocess.run(
            [sys.executable, str(file)],
            cwd=folder,
            env={**VARIABLES, "HOME": home, "USER": "somebody"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=DEADLINE_S,
        )
    return done.stdout.decode(errors="replace").strip()


async def tried(packages: list[str], programs: dict[str, str]) -> tuple[str | None, dict[str, str]]:
    """Return why there was no box, None with one, and what each program printed as a call of a session."""
    sessions = PythonSessions({**LIMITS, "packages": packages, "python": sys.executable})
    await sessions.open()
    printed = {}
    for name, program in programs.items():
        session = sessions.session()
        try:
            output = await session.tools[0].call({"code": program}, None)  # type: ignore[arg-type]  # asks no process
            printed[name] = output.strip()
        except ToolError as error:
            printed[name] = f"ToolError: {error}"
        finally:
            await session.close()
    sealed = (await sessions._server.start())["sealed"]
    await sessions.close()
    return sealed, printed


def main() -> int:
    """Run all, print a line for each, and return 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", nargs="?", const="-", help="write the rows there, or print them")
    options = parser.parse_args()
    here = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]
    programs = {name: text for name, text in PROGRAMS.items() if set(needed(text)) <= set(here)}
    sealed, printed = asyncio.run(tried(here, programs))
    rows = []
    for name in PROGRAMS:
        row = {"program": name, "outcome": "not tried: a package is not installed"}
        if name in programs:
            expected = plain(programs[name])
            row["outcome"] = "same" if printed[name] == expected else "differs"
            if row["outcome"] == "differs":
                row |= {"plain": expected, "session": printed[name]}
        rows.append(row)
        if options.json != "-":
            print(*row.values(), sep=" | ", flush=True)
    counts = {kind: sum(row["outcome"].startswith(kind) for row in rows) for kind in ("same", "differs", "not tried")}
    text = json.dumps({"sealed": sealed, "python": sys.version.split()[0], **counts, "rows": rows}, indent=1)
    if options.json == "-":
        print(text)
    elif options.json:
        Path(options.json).write_text(text + "\n")
    if options.json != "-":
        print(counts, f"(no box: {sealed})" if sealed else "(in a box)")
    return 1 if counts["differs"] else 0


if __name__ == "__main__":
    sys.exit(main())
