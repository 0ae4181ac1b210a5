"""Shows a run in the browser, while it trains or afterwards. For several runs it shows a list."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from loop_formats.places import run_meant
from loop_recipes.config.arguments import verb_parser
from loop_recipes.verbs import continuation
from loop_viewer.app import build_app
from loop_viewer.export import write_export
from loop_viewer.run_data import RunData
from loop_viewer.run_folder import RunFolder, is_run, runs_below
from loop_viewer.text import text_lines
from model_families.chat.tokenizer import read_tokenizer


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = verb_parser("view", __doc__)
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="folder of a run, of an evaluation or of several runs, or one collection's .jsonl",
    )
    parser.add_argument("--port", type=int, default=8750, help="port on 127.0.0.1 (8750; 0 for any)")
    parser.add_argument("--model", type=Path, help="folder with the policy's tokenizer.json, if the viewer asks for it")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write one self-contained HTML file and end")
    parser.add_argument(
        "--collection", action="append", metavar="ID", help="with --export: only this iteration (2) or id; repeatable"
    )
    parser.add_argument("--text", nargs="?", const="", metavar="TASK", help="print the tasks, or a task's rollouts")
    parser.add_argument("--max-mb", type=float, default=200.0, help="with --export: refuse to write more (200)")
    parsed = parser.parse_intermixed_args(arguments)
    if parsed.text and (not parsed.runs or is_run(Path(parsed.text))):  # --text before the runs took the first
        parsed.runs, parsed.text = [Path(parsed.text), *parsed.runs], ""
    if not parsed.runs:
        parser.error(f"which RUN{run_meant(Path())}")
    if not 0 <= parsed.port <= 65535:
        parser.error(f"--port is {parsed.port}; it must be 0 to 65535")
    try:
        run = open_runs(parsed.runs, parsed.model)
        if parsed.export is not None:
            if isinstance(run, RunFolder):
                names = run.runs()
                one = next(iter(names.values()))
                raise ValueError(f"--export writes one run, and here are {len(names)}: loop view {one} --export FILE")
            size = write_export(run, parsed.export, parsed.collection, parsed.max_mb)
            print(f"written: {parsed.export} ({size / 1e6:.1f} MB)")
            return 0
        if parsed.text is not None:
            for line in text_lines(run, parsed.text):
                print(line)
            return 0
        web.run_app(
            build_app(run, continuation),
            host="127.0.0.1",
            port=parsed.port,
            access_log=None,
            print=lambda text: print(f"{parser.prog}: {run.path}\n{text}", flush=True),
        )
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # a pager that was left
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except OSError as error:
        file = f"{parsed.export}: " if parsed.export is not None else ""
        print(
            f"{parser.prog}: {file}{error.strerror or error}; choose another --port or --export file", file=sys.stderr
        )
        return 1
    return 0


def open_runs(paths: Sequence[Path], model: Path | None = None) -> RunData | RunFolder:
    """Open a run or several runs: the named ones, or all runs in a folder that is not a run.

    Raises:
        ValueError: the paths hold nothing to show.
    """
    only = paths[0]
    if len(paths) > 1 or (only.is_dir() and not is_run(only) and any(runs_below(only))):
        return RunFolder(paths, model, read_tokenizer)
    return RunData(only, model, read_tokenizer=read_tokenizer)
