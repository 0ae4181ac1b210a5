"""The agent that the documentation shows is the one that is tried, and that the config starts."""

from pathlib import Path

from agent_environments.harness import chat_agent

PAGE = Path(__file__).parents[3] / "docs" / "your_own_task.md"


def test_the_documentation_shows_the_agent_as_it_is():
    blocks = [block.partition("```")[0] for block in PAGE.read_text().split("```python\n")[1:]]
    assert Path(chat_agent.__file__).read_text() in blocks
