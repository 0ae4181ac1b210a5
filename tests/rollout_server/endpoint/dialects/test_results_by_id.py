"""Results that come back in another order than their calls go to their calls by id, in each dialect that has ids."""

import json

import pytest

from rollout_server.endpoint.dialects.anthropic import Anthropic
from rollout_server.endpoint.dialects.chat import ChatDialect
from rollout_server.endpoint.dialects.responses import Responses

NAMES, RESULTS = ("c1", "c2"), (("c2", "two"), ("c1", "one"))
CALLED = {
    ChatDialect: [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "tool_calls": [{"id": name, "function": {"name": "f", "arguments": "{}"}} for name in NAMES],
        },
        *({"role": "tool", "tool_call_id": name, "content": text} for name, text in RESULTS),
    ],
    Anthropic: [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": name, "name": "f", "input": {}} for name in NAMES],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": name, "content": text} for name, text in RESULTS],
        },
    ],
    Responses: [
        {"role": "user", "content": "x"},
        *({"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"} for name in NAMES),
        *({"type": "function_call_output", "call_id": name, "output": text} for name, text in RESULTS),
    ],
}


@pytest.mark.fault("a field of somebody's chats was dropped, or taken in another sense than theirs")
@pytest.mark.parametrize("dialect", CALLED)
def test_results_stand_in_the_order_of_their_calls(dialect):
    body = {"input" if dialect is Responses else "messages": CALLED[dialect]}
    said = dialect().read(json.dumps(body).encode(), lambda _: None).conversation
    assert [message.content for message in said if message.role == "tool"] == ["one", "two"]
