"""Downloads the real AppWorld data and verifies it; trusts the output of the verification, and no exit code.

    .venv-appworld/bin/python appworld_adapter/worker/fetch_data.py --root worlds/appworld

Runs under the AppWorld interpreter and needs the internet. The engine's own download first deletes old data, and
reports success when it failed. So it goes into a folder beside ROOT; ``appworld verify tasks`` plays every reference
solution of train and dev there; and only when all of them solved their task does the folder take ROOT's place.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOWNLOAD_TIMEOUT_S = 1800
VERIFY_TIMEOUT_S = 7200
VERIFIED_MARK = "verified.txt"
SPLITS = ("train", "dev", "test_normal", "test_challenge")
VERIFIED_SPLITS = ("train", "dev")
"""The splits whose reference solutions come with the data."""


class FetchError(RuntimeError):
    """The data did not arrive whole; the message is one line."""


def run(appworld: Path, *arguments: str, timeout_s: float) -> str:
    """Run the engine's command and return its output, whatever its exit code."""
    try:
        finished = subprocess.run(
            [appworld, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FetchError(f"{appworld} {' '.join(arguments)}: {error}") from error
    return finished.stdout


def count_tasks(root: Path) -> dict[str, int]:
    """Count tasks per split; raises FetchError unless every split lists tasks, and every listed task exists."""
    counts = {}
    for split in SPLITS:
        listing = root / "data" / "datasets" / f"{split}.txt"
        lines = listing.read_text().split() if listing.is_file() else []
        task_ids = [line.partition(":")[0] for line in lines]
        missing = [task for task in task_ids if not (root / "data" / "tasks" / task / "specs.json").is_file()]
        if not task_ids or missing:
            what = f"task {missing[0]} is missing" if missing else "it lists no task"
            raise FetchError(f"split {split} did not arrive whole: {what}")
        counts[split] = len(task_ids)
    return counts


def verify(appworld: Path, root: Path) -> str:
    """Return the line that says that all reference solutions passed; raises FetchError if one failed."""
    counts = count_tasks(root)
    printed = run(appworld, "verify", "tasks", "--root", str(root), timeout_s=VERIFY_TIMEOUT_S)
    verdict = re.search(r"Passed (\d+)/(\d+) tasks\.", printed)
    if verdict is None:
        raise FetchError(f"`appworld verify tasks` gave no verdict: {last_line(printed)}")
    expected = sum(counts[split] for split in VERIFIED_SPLITS)
    if not int(verdict[1]) == int(verdict[2]) == expected:
        raise FetchError(f"`appworld verify tasks` says {verdict[0]!r}, expected {expected} of {expected}")
    return f"{verdict[0]} Tasks: {counts}"


def fetch(appworld: Path, root: Path) -> str:
    """Download the data into a folder beside ``root``, verify it and move it to ``root``; return the verdict's line.

    Raises:
        FetchError: no or incomplete download, a reference solution that failed, or a ``root`` that holds something
            else; ``root`` stays as it was.
    """
    if root.exists() and not (root / "data").is_dir() and not (root.is_dir() and not any(root.iterdir())):
        raise FetchError(f"--root {root} holds something other than AppWorld's data; give another folder")
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
    except OSError as error:
        raise FetchError(f"--root {root} cannot be created: {error.strerror}; give another folder") from error
    try:
        printed = run(appworld, "download", "data", "--root", str(temporary), timeout_s=DOWNLOAD_TIMEOUT_S)
        if not (temporary / "data" / "datasets").is_dir():
            raise FetchError(f"the download failed: {last_line(printed)}; is the internet reachable from here?")
        verdict = verify(appworld, temporary)
        for leftover in ("experiments", ".tmp"):
            shutil.rmtree(temporary / leftover, ignore_errors=True)
        (temporary / VERIFIED_MARK).write_text(verdict + "\n")
        temporary.chmod(0o755)
        shutil.rmtree(root, ignore_errors=True)  # nothing there was verified
        temporary.rename(root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return verdict


def last_line(printed: str) -> str:
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description="Download and verify the AppWorld data.")
    parser.add_argument("--root", type=Path, required=True, help="folder to hold data/; the later APPWORLD_ROOT")
    root = parser.parse_args().root.resolve()
    mark = root / VERIFIED_MARK
    if mark.is_file() and (root / "data" / "datasets").is_dir():
        print(f"{root}: already there ({mark.read_text().strip()})")
        return
    print(f"downloading the AppWorld data, then playing all reference solutions of train and dev; into {root}")
    try:
        print(f"{root}: {fetch(Path(sys.executable).with_name('appworld'), root)}")
    except FetchError as error:
        sys.exit(f"fetch_data.py: {error}")


if __name__ == "__main__":
    main()
