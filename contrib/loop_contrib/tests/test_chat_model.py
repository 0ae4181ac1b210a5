"""A model behind a chat endpoint; its absence is tested with a judge, who asks it."""

import pytest

from agent_environments.protocol import EnvironmentCrashed
from contrib_support.chat_endpoint import FakeChatEndpoint
from loop_contrib.chat_model import ChatEndpoint, ChatModel


async def test_one_that_is_not_open_is_away():
    with pytest.raises(EnvironmentCrashed, match="the judge is not there: the pool is not open"):
        await ChatModel("judge", ChatEndpoint("http://localhost/v1", "base", None)).ask("Hello?")


def test_a_section_of_a_config_says_its_name_in_what_is_wrong():
    with pytest.raises(ValueError, match=r"^unknown key 'judge.key'"):
        ChatEndpoint.of("judge", {"url": "http://localhost/v1", "model": "m", "key": "sk"})


THOUGHT, SAID = "At first a 2, or ###STOP###.", "An 8."
PARTS = [{"type": "reasoning", "text": THOUGHT}, {"type": "text", "text": SAID}]


@pytest.mark.fault("a model that answers for the environment thinks in its text, and the thought is read")
@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (f"<think>{THOUGHT}</think>{SAID}", SAID),
        (f"\n<think>\n{THOUGHT}\n</think>\n\n{SAID}", SAID),
        (f"{THOUGHT}\n</think>\n\n{SAID}", SAID),
        (f"<think>{THOUGHT}</think>\n<think>{THOUGHT}</think>{SAID}", SAID),
        (f"{SAID}\n<think>{THOUGHT}</think>", SAID),
        (f"{SAID}\n<think>{THOUGHT}", SAID),
        (f"<think>{THOUGHT}", ""),
        (f"[THINK]{THOUGHT}[/THINK]{SAID}", SAID),
        (f"<seed:think>{THOUGHT}</seed:think>{SAID}", SAID),
        (PARTS, SAID),
    ],
)
async def test_nobody_reads_what_a_model_thinks_in_its_text(content, answer):
    async with FakeChatEndpoint().served() as endpoint:
        model = ChatModel("judge", ChatEndpoint(endpoint.url, "base", None))
        await model.open()
        endpoint.reply = lambda body: {"content": "Hello." if "hello" in str(body) else content}
        try:
            assert await model.ask("Which grade?") == answer
        finally:
            await model.close()
