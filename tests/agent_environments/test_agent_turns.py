"""Which messages of a conversation are the agent's own."""

import pytest

from agent_environments.agent_turns import AgentTurn, agent_turns

MESSAGES = [
    {"role": role, "content": content}
    for role, content in [
        ("system", "You act."),
        ("user", "An example."),
        ("assistant", "Shown in the prompt."),
        ("user", "Task: do it."),
        ("assistant", "first"),
        ("user", "one"),
        ("assistant", "written by the harness"),
        ("user", "two"),
        ("assistant", "second"),
    ]
]


def test_what_others_wrote_in_the_agents_name_is_no_turn():
    assert agent_turns(MESSAGES, [4, 8]) == [AgentTurn("first", "one"), AgentTurn("second", None)]


def test_bad_input_is_named():
    for place in (-1, 5, 9):
        with pytest.raises(ValueError, match=f"message {place} is not an assistant message"):
            agent_turns(MESSAGES, [place])
