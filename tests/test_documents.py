"""The documents: links that lead somewhere, files and config keys that exist, blocks of code that are what they say."""

from __future__ import annotations

import ast
import importlib
import json
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import yaml
from omegaconf import OmegaConf

from agent_environments.counter import CounterPool
from agent_environments.protocol import create_pool
from loop_formats.collection_request import CollectionRequest
from loop_formats.schema import ConfigError, fields_of
from loop_plumbing.plug_ins import GROUPS
from loop_recipes.config.files import compose
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.config.rollout_node import described_node
from loop_recipes.config.sft_config import SftConfig
from loop_recipes.evaluation.config import EvalConfig
from loop_recipes.paths import RECIPES as RECIPE_NAMES
from loop_recipes.verbs.keys import RECIPES, rows
from rollout_server.client import RolloutClient, TaskList
from rollout_server.config import as_written
from support.configs import files_read_once  # noqa: F401 - a fixture for all tests here
from support.random_policy import write_tokenizer
from support.texts import texts_beside
from support.tool_modules import PRODUCTS, write
from support.viewer_run import ordinary

TABLES = texts_beside(__file__)

CHECKOUT = Path(__file__).parents[1]
PAGES = sorted(page for place in ("docs/**/*.md", "*.md", "*/README.md") for page in CHECKOUT.glob(place))
LANGUAGES = ("bash", "json", "python", "toml", "yaml")


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def named(pattern: str, pages: list[Path], flags: int = 0) -> list[tuple[Path, str]]:
    """What a pattern finds in pages, of which there must be some: (page, what its group matched)."""
    found = [(page, each) for page in pages for each in re.findall(pattern, page.read_text(), flags)]
    assert len(found) > 20, f"{pattern} finds next to nothing"
    return found


def test_links_lead_somewhere():
    wrong = []
    for page, target in named(r"\]\((?!https?:)([^)#\s]*(?:#[^)\s]*)?)\)", PAGES):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            wrong.append(f"{page.name} links to {target}")
    assert wrong == []


CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]


def test_pictures_are_as_their_script_draws_them():
    drawn = runpy.run_path(str(CHECKOUT / "docs/images/draw.py"))["PICTURES"]
    for name, draw in drawn.items():
        assert (CHECKOUT / "docs/images" / name).read_text() == draw(), f"python docs/images/draw.py writes {name} anew"


def test_files_that_are_named_exist():
    """Paths from the repository's root, in backquotes or commands; what a run or a set-up makes is not looked for."""
    tracked = subprocess.run(["git", "ls-files"], cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    known = {str(parent) for name in tracked.split() for parent in [Path(name), *Path(name).parents]}
    folders = "recipes|loop_formats|model_families|rollout_server|agent_environments|appworld_adapter|tests|benchmarks"
    names = named(rf"(?<![\w/.$}}-])((?:{folders}|experiments|slurm|docs)/[\w./-]+)", CURRENT)
    assert [
        f"{page.name} names {name}"
        for page, name in names
        if not name.startswith("appworld_adapter/pool/run-")
        and name.rstrip("./") not in known
        and not (CHECKOUT / name.rstrip("./")).exists()
    ] == []


SECTIONS = r"collection|dev_evaluation|endpoint|limits|node\.(?:model|servers)|rollouts|sampler_gap|servers|stop|update"
"""Sections all of whose keys are in a schema; those of a component are its class's arguments. A node's own YAML has its
keys without ``node.``."""


def test_keys_that_are_named_exist():
    known = {key for section in RECIPES.values() for key, *_ in rows(section)}
    known |= {key.removeprefix("node.") for key in known}
    keys = named(rf"(?<![\w./-])((?:{SECTIONS})(?:\.[a-z_]+)+)\b", CURRENT)
    assert [f"{page.name} names {key}" for page, key in keys if key not in known] == []


def test_pages_that_code_names_exist():
    names = ["*.py", "*.yaml", "*.sh", "*.sbatch", "Makefile", "*.toml", ".importlinter"]
    said = subprocess.run(
        ["git", "grep", "-ohE", r"docs/[A-Za-z0-9_/]+\.md", "--", *names], cwd=CHECKOUT, capture_output=True, text=True
    ).stdout.split()
    assert said
    assert not sorted(name for name in set(said) if not (CHECKOUT / name).exists())


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its text, and the page with the line that it begins after."""

    language: str
    text: str
    place: str


def blocks(*languages: str) -> list[Any]:
    """The blocks of all pages in one of the languages, each a parameter of a test that is named by its place."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S):
            place = f"{page.relative_to(CHECKOUT)}:{1 + text.count(chr(10), 0, match.start())}"
            found.append(Block(match[1], match[2], place))
    return [pytest.param(block, id=block.place) for block in found if block.language in languages]


def test_each_block_says_its_language():
    assert {block.values[0].language for block in blocks("", *LANGUAGES)} <= {"", *LANGUAGES}
    assert [page.name for page in PAGES if page.read_text().count("```") % 2] == []


@pytest.mark.parametrize("block", blocks("python"))
def test_python_compiles_and_what_it_imports_is_there(block):
    for statement in ast.walk(ast.parse(block.text, block.place)):
        if isinstance(statement, ast.Import):
            assert all(find_spec(each.name) for each in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            module = importlib.import_module(statement.module or "")
            assert [each.name for each in statement.names if not hasattr(module, each.name)] == []


@pytest.mark.parametrize("block", [block for block in blocks("python") if "RolloutClient" in block.values[0].text])
def test_the_client_takes_what_pages_ask_it_for(block, tmp_path, monkeypatch):
    """Each call is compared with the client's signatures; nothing is sent."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", "secret")
    log = tmp_path / "runs/demo/node/collections/demo-1a2b3c-i0006-0123456789.jsonl"
    log.parent.mkdir(parents=True)
    write_tokenizer(tmp_path / "model")
    stored = [ordinary(tmp_path, log.stem, "a_1", index, Random(index)) for index in range(4)]
    log.write_text("".join(f"{rollout.to_json()}\n" for rollout in stored))
    client = create_autospec(RolloutClient, spec_set=True)
    client.return_value.tasks.return_value = TaskList("synthetic", ["a_1"])
    client.return_value.rollouts.return_value = []
    monkeypatch.setattr("rollout_server.client.RolloutClient", client)
    exec(compile(block.text, block.place, "exec"), {})
    (request,) = client.return_value.start_collection.call_args.args
    assert CollectionRequest.from_dict(request.to_dict()) == request


def of_a_run(content: dict[str, Any]) -> dict[str, Any]:
    """A whole config with the keys that a block shows: those of a run, of its limits, of its node or of an agent."""
    if "machine" in content:
        return content
    if "limits" in content:
        content = {"collection": content}
    of_node = not content.keys() <= fields_of(LoopConfig).keys() or "observation_role" in content.get("model", {})
    return {"machine": "tiny_cpu", **({"node": content} if of_node else content)}


@pytest.mark.parametrize("block", blocks("yaml"))
def test_a_config_is_read_and_its_environment_takes_its_options(block, tmp_path, monkeypatch):
    """The tasks that a config names are there; no environment is opened."""
    monkeypatch.chdir(tmp_path)
    for name in ("my_tools", "my_tasks"):
        write(tmp_path, PRODUCTS.replace("range(2, 22)", "range(2, 100)"), name)
    for folder in ("worlds/appworld/data/datasets", "worlds/appworld/data/tasks", "data/backend_tasks"):
        (tmp_path / folder).mkdir(parents=True)
    task = {"problem_description": "d", "ground_truth": "def f(): return 1", "test_cases": {"test1": "f()"}}
    for split in ("train", "test"):
        (tmp_path / f"data/backend_tasks/{split}.jsonl").write_text(json.dumps(task))
    (tmp_path / "my_tasks/tests").mkdir(parents=True)
    harbor = {"task.toml": "environment.docker_image = 'i'", "instruction.md": "Work.", "tests/test.sh": ""}
    for name, text in harbor.items():
        (tmp_path / "my_tasks" / name).write_text(text)
    monkeypatch.setattr("model_families.weights.hub.is_hub_name", lambda name: False)  # nothing is fetched
    monkeypatch.setitem(sys.modules, "my_package", module_from_spec(ModuleSpec("my_package", None)))
    monkeypatch.setitem(sys.modules, "my_package.my_module", SimpleNamespace(MyPool=CounterPool))
    file = tmp_path / "mine.yaml"
    shown = as_written(OmegaConf.create(textwrap.dedent(block.text)))
    file.write_text(yaml.safe_dump(of_a_run(shown)))
    trained = read_config(compose(str(file)), LoopConfig)
    scored = read_config(compose(str(file), recipe="eval_appworld"), EvalConfig)
    environment = described_node(compose(str(file))).environment
    pool = create_pool(environment.name, environment.options, lambda text: [])
    if "machine" in shown:  # all of a run
        assert len(pool.tasks(trained.collection.split)) >= trained.collection.tasks_per_iteration
        assert pool.tasks(str(scored.split))


NO_KEYS = TABLES["no_keys"]
"""What looks like a key in a sentence and is none, and what it is."""


def spans() -> list[str]:
    """What looks like keys with values in the sentences of pages, each once."""
    texts = [re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S) for page in CURRENT]
    found = re.findall(r"`((?:~?[a-z_.]+=[^` ][^`]*)+)`", re.sub(r" *\n", " ", "\n".join(texts)))
    return sorted({*found} - NO_KEYS.keys())


def test_sentences_have_words_with_values():
    assert len(spans()) > 20


@pytest.mark.parametrize("span", spans())
def test_words_in_a_sentence_are_keys_with_values_that_they_take(span, monkeypatch):
    """Of one recipe at least, beside the config of the tiny policy."""
    monkeypatch.setattr("model_families.weights.hub.is_hub_name", lambda name: False)  # nothing is fetched
    words = [] if "..." in span else shlex.split(span)
    if not all(re.match(r"~?[a-z_.]+", word) for word in words):
        return
    refused = []
    for recipe, section in (("loop_appworld", LoopConfig), ("eval_appworld", EvalConfig), ("sft_appworld", SftConfig)):
        data = ["data=chats.jsonl"] if recipe == "sft_appworld" else []
        try:
            read_config(compose("tiny_cpu", [*data, *words], recipe), section)
            return
        except ConfigError as error:
            refused.append(str(error))
    raise AssertionError(refused)


@pytest.mark.parametrize("block", blocks("json"))
def test_a_request_is_read(block):
    CollectionRequest.from_dict(json.loads(block.text))


@pytest.mark.parametrize("block", blocks("toml"))
def test_a_package_adds_to_groups_that_there_are(block):
    groups = tomllib.loads(block.text)["project"]["entry-points"]
    assert {name.removeprefix("torchtune_loop.") for name in groups} == {*GROUPS}


def commands(program: str) -> list[list[str]]:
    """The words after ``program`` in the commands of all pages, in blocks and in sentences; each command once."""
    found = {}
    for page in PAGES:
        text = re.sub(r" *\\\n *", " ", page.read_text())
        for line in re.findall(rf"(?:^(?:\$ )?|`|&& ){program} ([^`\n]*)", text, flags=re.M):
            words = shlex.split(line.replace("[", " ").replace("]", " "), comments=True)
            found[" ".join(words)] = words[: words.index("&&")] if "&&" in words else words
    return list(found.values())


def test_make_has_the_targets_that_pages_and_workflows_name():
    targets = {*re.findall(r"^([\w-]+):", (CHECKOUT / "Makefile").read_text(), flags=re.M), "quick-pure", "quick-torch"}
    asked = {word for words in commands("make") for word in words if "=" not in word and not word.startswith("-")}
    steps = "".join(file.read_text() for file in (CHECKOUT / ".github/workflows").glob("*.yml"))
    by_workflows = {*re.findall(r"\bmake ([a-z-]+)", steps)}
    assert min(len(asked), 5 * len(by_workflows)) > 10
    assert not (asked | by_workflows) - targets
    scripts = re.findall(r"\bbash (\S+)", steps)
    assert scripts
    assert all((CHECKOUT / script).is_file() for script in scripts)


@pytest.mark.parametrize("words", commands(r"(?:\S*/)?python(?: -E)?"), ids=" ".join)
def test_a_script_has_the_options_that_pages_give(words):
    if words[:2] in (["-m", "pytest"], ["-m", "vllm.entrypoints.launchers.api_server.entry"]):
        return
    script = CHECKOUT / words[0]
    text = script.read_text()
    for folder, module in re.findall(r"^from (experiments|benchmarks)\.?(\w*) import", text, flags=re.M):
        text += (CHECKOUT / folder / f"{module}.py").read_text()
    own = words[: words.index("--")] if "--" in words else words
    assert [word for word in own if word.startswith("--") and f'"{word}"' not in text] == []


@pytest.mark.parametrize("words", commands("tune run"), ids=" ".join)
def test_tune_has_the_recipes_and_configs_that_pages_name(words):
    recipe, option, name = words
    assert (recipe in RECIPE_NAMES, option) == (True, "--config")
    if not name.rpartition("/")[2].isupper():
        compose(name, recipe=recipe)
