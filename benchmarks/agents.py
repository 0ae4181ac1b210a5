"""Install whole agents, start them as docs/agents.md says, and play each on a plain task.

    python benchmarks/agents.py [--install] [--json [PATH]] [AGENT ...]

The policy is scripted: it lists, reads, edits, tests and ends, by each agent's own tools. All else is the product's:
the node, its recording endpoint, the agents' starts. A row is an agent's episode: sequences, turns, tokens of its first
prompt, tokens stored (of all sequences) and computed (where shared beginnings are computed once), refusals, how it
ended. Tokens are those of Qwen2.5's tokenizer.

Ends with 1 if an agent is not played to its grade, is refused something, or leaves more than one sequence, which only
aider may: it places its files anew in each round.

--install  installs each anew, in a temporary folder, by npm or uv, in the version that was tried; else the programs on
           PATH are played
--json     writes a list of one object an agent to PATH, or prints it
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# The root and recipes/ too, because folders of tests/ are called like packages and hide those that are installed.
sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "recipes", "tests"))

from support import whole_agents

MAY_SPLIT = ("aider",)
COLUMNS = ("sequences", "turns", "first_prompt", "stored", "computed", "reward", "end_reason", "exit_status")


def played(name: str, policy: Path, folder: Path, install: bool) -> dict[str, Any]:
    """Return an agent's row; ``problem`` says what is wrong with it, if anything."""
    try:
        if install:
            program = whole_agents.install(name, folder / "program")
        else:
            program = shutil.which(Path(whole_agents.AGENTS[name].program).name) or "not on PATH"
        environment = whole_agents.environment_of(name, program)
        outcome = asyncio.run(whole_agents.play(name, environment, policy, folder / "episode"))
    except subprocess.CalledProcessError as error:
        errors = (error.stderr or b"").decode(errors="replace").strip().splitlines()
        return {"agent": name, "problem": f"it cannot be installed: {errors[-1] if errors else error}"}
    except (OSError, RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        return {"agent": name, "problem": str(error)}
    problems = [f"reward {outcome.reward:g}"] if outcome.reward != 1.0 else []
    if outcome.sequences > 1 and name not in MAY_SPLIT:
        problems.append(f"{outcome.sequences} sequences")
    if outcome.refusals:
        problems.append(f"{len(outcome.refusals)} refusals")
    return {**outcome.row(), "problem": ", ".join(problems) or None}


def line(row: dict[str, Any]) -> str:
    """Return a row for the terminal."""
    cells = [f"{row.get(name, '-')!s:>{max(len(name), 6)}}" for name in COLUMNS]
    return f"{row['agent']:<15} {'  '.join(cells)}  {row['problem'] or 'ok'}"


def main() -> int:
    """Play the agents; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agents", nargs="*", metavar="AGENT", help=f"of {', '.join(whole_agents.AGENTS)}")
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--json", nargs="?", const="-", metavar="PATH")
    options = parser.parse_args()
    if unknown := [name for name in options.agents if name not in whole_agents.AGENTS]:
        parser.error(f"there is no {unknown[0]}; there are {', '.join(whole_agents.AGENTS)}")
    rows = []
    out = sys.stderr if options.json == "-" else sys.stdout
    print(f"{'':<15} {'  '.join(f'{name:>6}' for name in COLUMNS)}", file=out)
    with tempfile.TemporaryDirectory(prefix="agents-benchmark-") as name:
        policy = whole_agents.write_policy(Path(name) / "policy")
        for agent in options.agents or whole_agents.AGENTS:
            folder = Path(name) / agent
            rows.append(played(agent, policy, folder, options.install))
            shutil.rmtree(folder, ignore_errors=True)  # hundreds of megabytes each
            print(line(rows[-1]), file=out, flush=True)
    text = json.dumps(rows, indent=1)
    if options.json == "-":
        print(text)
    elif options.json:
        Path(options.json).write_text(text + "\n")
    return 1 if any(row["problem"] for row in rows) else 0


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    sys.exit(main())
