"""The documents: links that lead somewhere, files and config keys that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from loop_recipes.launch.keys import RECIPES, rows

CHECKOUT = Path(__file__).parents[1]
PAGES = sorted([*CHECKOUT.glob("docs/**/*.md"), *CHECKOUT.glob("*.md")])


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]*(?:#[^)\s]*)?)\)", page.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    """Paths from the repository's root, in backquotes or commands; what a run or a set-up makes is not looked for."""
    tracked = subprocess.run(["git", "ls-files"], cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    known = {str(parent) for name in tracked.split() for parent in [Path(name), *Path(name).parents]}
    folders = "recipes|loop_formats|model_families|rollout_server|agent_environments|appworld_adapter|tests|benchmarks"
    folders += "|experiments|slurm|docs"
    for name in re.findall(rf"(?<![\w/.$}}-])((?:{folders})/[\w./-]+)", page.read_text()):
        name = name.rstrip("./")
        if name.startswith("appworld_adapter/pool/run-") or page.name == "CHANGELOG.md":
            continue
        assert name in known or (CHECKOUT / name).exists(), f"{page.name} names {name}"


SECTIONS = r"collection|dev_evaluation|endpoint|limits|node\.(?:model|servers)|rollouts|sampler_gap|servers|stop"
SECTIONS += "|update"
"""Sections all of whose keys are in a schema; those of a component are its class's arguments. A node's own YAML has its
keys without ``node.``."""


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_keys_that_are_named_exist(page):
    known = {key for section in RECIPES.values() for key, *_ in rows(section)}
    known |= {key.removeprefix("node.") for key in known}
    named = re.findall(rf"(?<![\w./-])((?:{SECTIONS})(?:\.[a-z_]+)+)\b", page.read_text())
    assert not set(named) - known


def test_pages_that_code_names_exist():
    names = ["*.py", "*.yaml", "*.sh", "*.sbatch", "Makefile", "*.toml", ".importlinter"]
    said = subprocess.run(
        ["git", "grep", "-ohE", r"docs/[A-Za-z0-9_/]+\.md", "--", *names], cwd=CHECKOUT, capture_output=True, text=True
    ).stdout.split()
    assert said
    assert not sorted(name for name in set(said) if not (CHECKOUT / name).exists())
