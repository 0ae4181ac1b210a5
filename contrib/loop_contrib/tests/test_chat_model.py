"""A model behind a chat endpoint; what it answers is tested with those who ask it, ColBench's human and a judge."""

import pytest

from agent_environments.protocol import EnvironmentCrashed
from loop_contrib.chat_model import ChatEndpoint, ChatModel


async def test_one_that_is_not_open_is_away():
    with pytest.raises(EnvironmentCrashed, match="the judge is not there: the pool is not open"):
        await ChatModel("judge", ChatEndpoint("http://localhost/v1", "base", None)).ask("Hello?")


def test_a_section_of_a_config_says_its_name_in_what_is_wrong():
    with pytest.raises(ValueError, match=r"^unknown key 'judge.key'"):
        ChatEndpoint.of("judge", {"url": "http://localhost/v1", "model": "m", "key": "sk"})
