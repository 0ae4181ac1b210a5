"""The code on docs/your_own_task.md runs as it stands there."""

import re
from pathlib import Path

import yaml

from agent_environments.conformance import check_conformance
from agent_environments.protocol import create_pool
from support.adapter_support import word_spans
from support.tool_modules import call, write

PAGE = (Path(__file__).parents[3] / "docs" / "your_own_task.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
GAME, FUNCTIONS, CLASS = (
    next(block for block in BLOCKS if word in block) for word in ("class Game", "def multiply", "class Light")
)
CONFIG = re.search(r"```yaml\n(.*?)```", PAGE, flags=re.S)[1]


async def play(pool, task, *actions):
    await pool.open()
    environment = await pool.acquire("page")
    messages = await environment.start(task)
    for action in actions:
        await environment.step(action)
    grade = await environment.grade()
    await environment.close()
    return messages, grade


async def test_the_first_file(tmp_path):
    pool = create_pool("tools", {"module": write(tmp_path, GAME, "my_game"), "max_worlds": 1}, word_spans)
    messages, grade = await play(pool, "task7", "10", "7")
    assert messages[-1].content == "Guess a number between 1 and 20. Reply with the number only."
    assert grade.success
    assert not (await play(pool, "task7", "10", "Seven."))[1].reward
    await pool.close()


async def test_the_twenty_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, FUNCTIONS, "my_tools")
    assert len([line for line in FUNCTIONS.splitlines() if line]) <= 20
    options = dict(yaml.safe_load(CONFIG)["node"]["environment"])
    pool = create_pool(options.pop("name"), options, word_spans)
    _, grade = await play(pool, "task6", call("multiply", a=7, b=37), call("answer", value=259))
    assert grade.success
    assert not (await play(pool, "task6"))[1].reward
    await check_conformance(pool, "task1")
    await pool.close()


async def test_the_class(tmp_path):
    tasks = 'TASKS = [{"begins_on": True}]'
    file = write(tmp_path, f"from agent_environments.tools import reward, tool\n\n{CLASS}\n{tasks}\n")
    pool = create_pool("tools", {"module": file, "max_worlds": 1}, word_spans)
    messages, grade = await play(pool, "task1", call("press"))
    assert messages[-1].content == "The light is on."
    assert grade.success
    await pool.close()
