"""Agents by name: what is refused before an episode begins, and how one is started."""

import json
import sys

import pytest

from agent_environments.harness import agents
from agent_environments.harness.agents import Agent, Start
from agent_environments.harness.pool import HarnessPool
from agent_environments.program_protocol import Connection
from support.episodes import begun_episode
from support.texts import texts_beside

TABLES = texts_beside(__file__)

CONNECTION = Connection("http://127.0.0.1:1/v1", "sk-1", "c1.t_1.0", "c1", 0, 8)
REPORTS = TABLES["reports"]
GRADE = ["{python}", "-c", "print('{\"reward\": 1}')"]


def start(connection, prompt):
    words = ["-c", REPORTS, "--", prompt]
    return Start(words, {"MODEL": "policy", "MORE": "agent"}, {".writer/config": f"key={connection.api_key}"})


AGENT = Agent(program=sys.executable, install="make writer", least_context=5_000, start=start)
GONE = Agent(program="no-such-agent", install="make gone", least_context=0, start=start)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    there = {"writer": f"{__name__}:AGENT", "gone": f"{__name__}:GONE", "none": f"{__name__}:CONNECTION"}
    there |= {"lost": "no_such_module:AGENT"}
    monkeypatch.setattr(agents, "plug_ins", {"agents": there}.__getitem__)


@pytest.fixture
def tasks(tmp_path):
    for name in ("t_1", "deep/t_2"):
        (tmp_path / "tasks" / name / "src").mkdir(parents=True)
        (tmp_path / "tasks" / name / "prompt.md").write_text(f"--mend {name}\nand 'this'\n")
    return tmp_path / "tasks"


def pool(folder, **options):
    given = {"agent": "writer", "tasks": {"train": ["t_1", "deep/t_2"]}, "task_files": str(folder)}
    return HarnessPool(lambda text: [], **{**given, "grade_command": GRADE, **options})


async def test_an_agent_finds_its_files_its_prompt_and_its_settings(tasks, tmp_path):
    template = tmp_path / "template"
    (template / ".writer").mkdir(parents=True)
    (tmp_path / "mine").write_text("mine")
    (template / ".writer/config").symlink_to(tmp_path / "mine")
    made = pool(tasks, variables={"MORE": "user"}, home_template=str(template))
    await made.open()
    async with begun_episode(made, "deep/t_2") as environment:
        assert (await environment.run(CONNECTION)).status == 0
        said = json.loads((environment._folder / "said.json").read_text())
    assert said["words"][-1] == "--mend deep/t_2\nand 'this'\n"
    assert (said["config"], said["mode"][-3:], said["variables"]) == ("key=sk-1", "600", ["policy", "user"])
    assert said["files"] == ["prompt.md", "src"]
    assert (tmp_path / "mine").read_text() == "mine"


async def test_a_command_begins_with_the_files_of_its_task_too(tasks):
    made = pool(tasks, agent=None, command=["{python}", "-c", "import os; os.remove('prompt.md')"])
    async with begun_episode(made, "t_1") as environment:
        assert (await environment.run(CONNECTION)).status == 0
    assert (tasks / "t_1/prompt.md").exists()


@pytest.mark.parametrize(("options", "why"), TABLES["a_config_that_starts_no_agent_is_refused"])
def test_a_config_that_starts_no_agent_is_refused(tasks, options, why):
    with pytest.raises(ValueError, match=why):
        pool(tasks, **options)


def test_no_agents_at_all_is_said(tasks, monkeypatch):
    monkeypatch.setattr(agents, "plug_ins", lambda group: {})
    with pytest.raises(ValueError, match=r"There are: none \(torchtune-loop-contrib has some\)"):
        pool(tasks)


@pytest.mark.parametrize(("options", "why"), TABLES["what_this_machine_lacks_is_told_before_anything_starts"])
def test_what_this_machine_lacks_is_told_before_anything_starts(tasks, options, why):
    with pytest.raises(FileNotFoundError, match=why):
        pool(tasks, **options).preflight(["t_1"])


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        (None, "there is no .*prompt.md, which tells the agent its task"),
        (b"", "must be a text of 1 to "),
        (b" \n", "must be a text of 1 to "),
        (b"a\0b", "without NULs"),
        (b"\xff", "is not UTF-8 text"),
        (b"x" * (128 << 10), "and has 131072 bytes: put longer texts into a file"),
    ],
)
async def test_a_prompt_that_cannot_be_told_is_refused(tasks, prompt, why):
    file = tasks / "t_1/prompt.md"
    file.unlink()
    if prompt is not None:
        file.write_bytes(prompt)
    with pytest.raises((ValueError, FileNotFoundError), match=why):
        await pool(tasks).open()
    await pool(tasks, agent=None, command=["true"]).open()  # it may be told in another way


async def test_the_longest_prompt_is_told(tasks):
    (tasks / "t_1/prompt.md").write_bytes(b"x" * agents.MAX_PROMPT_BYTES)
    async with begun_episode(pool(tasks), "t_1") as environment:
        assert (await environment.run(CONNECTION)).status == 0


def test_the_tasks_are_known_before_it_is_opened(tasks):
    assert pool(tasks).preflight("train") == ["t_1", "deep/t_2"]
    assert pool(tasks).preflight(["deep/t_2"]) == ["deep/t_2"]
    assert pool(tasks).least_context == 5_000
    in_world = HarnessPool(lambda text: [], ["true"], world={"name": "counter"})
    assert (in_world.preflight("train"), in_world.least_context) == (None, 0)
