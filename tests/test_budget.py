"""The budget of docs/architecture.md: the project is no larger than it says; ``pytest -rP`` prints the figures."""

import re
import subprocess
from pathlib import Path

from loop_recipes.cli import VERBS
from loop_recipes.launch.keys import RECIPES, rows

CHECKOUT = Path(__file__).parents[1]
NOT_BY_HAND = ("CHANGELOG.md",)
"""A diary, which nobody reads from beginning to end."""
PACKAGES = ("recipes", "loop_formats", "model_families", "rollout_server", "agent_environments", "appworld_adapter")


def tracked(pattern: str) -> list[Path]:
    found = subprocess.run(["git", "ls-files", pattern], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    return [CHECKOUT / name for name in found.stdout.split()]


def words(pages: list[Path]) -> int:
    """Tables and code included."""
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def figures() -> dict[str, int]:
    """What the table counts, by the name that it has there."""
    pages = [page for page in tracked("*.md") if page.parent in (CHECKOUT, CHECKOUT / "docs")]
    by_hand = [page for page in pages if page.name not in NOT_BY_HAND]
    sources = [file for package in PACKAGES for file in tracked(f"{package}/*.py")]
    return {
        "pages by hand": len(by_hand),
        "words on them": words(by_hand),
        "words on the pages of results": words(tracked("docs/results/*.md")),
        "lines of the packages": sum(file.read_bytes().count(b"\n") for file in sources),
        "verbs of `loop`": len(VERBS),
        "config keys": len({row for section in RECIPES.values() for row in rows(section)}),
    }


def test_the_project_keeps_to_its_budget():
    table = (CHECKOUT / "docs/architecture.md").read_text().partition("**Budget.**")[2].partition("\n## ")[0]
    most = {name: int(value.replace(",", "")) for name, value in re.findall(r"^\| (.+) \| ([\d,]+) \|$", table, re.M)}
    counted = figures()
    print(*(f"{name}: {counted[name]:,} of {most[name]:,}" for name in counted), sep="\n")
    assert most.keys() == counted.keys()
    assert not [name for name in counted if counted[name] > most[name]]
