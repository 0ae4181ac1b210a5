"""Every route of the node, asked what nobody asks: one line of JSON each time, and the node goes on."""

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings

from rollout_server.app import _build_app
from support.counter_node import TOKEN, counter_request
from support.odd_requests import DEEP, OddRequest, ask, check_answer, odd_requests
from support.open_session import OpenSession

pytestmark = pytest.mark.attack

KEYS = [
    *("id", "tasks", "rollouts_per_task", "policy_version", "limits", "sampling", "branches", "seed"),
    *("task_id", "wait_s", "model", "seconds", "max_context"),
    *("messages", "tools", "tool_choice", "stop", "n", "stream", "max_tokens", "action", "reward"),
]
QUERIES = ["after", "split"]


def routes(node):
    """(method, path) of all that is served but the metrics, which are no JSON."""
    served = [(route.method, route.resource.canonical) for route in _build_app(node, "x").router.routes()]
    return [(method, path) for method, path in served if path != "/metrics" and method != "HEAD"]


async def test_whatever_is_asked_the_answer_is_one_line_of_json(running):
    key = OpenSession(running).key
    places = routes(running.node)
    assert len(places) > 20

    @settings(max_examples=300, database=None, suppress_health_check=list(HealthCheck))
    @given(odd_requests(places, KEYS, QUERIES))
    def attack(odd):
        for token in (TOKEN, key, "wrong"):
            status, body = ask(running.url, token, odd)
            check_answer(status, body, *(["/node", key] if status >= 400 else []))

    await asyncio.to_thread(attack)
    assert (await running.call(running.client.health))["status"] == "ok"


SURROGATE = json.dumps({"id": "c", "tasks": ["\ud800"], "rollouts_per_task": 1, "policy_version": 0}).encode()
NO_BOUNDARY = {"Content-Type": "multipart/form-data"}


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (OddRequest("POST", "/v1/collections", DEEP, {}), "not JSON"),
        (OddRequest("POST", "/v1/episodes", DEEP, {}), "not JSON"),
        (OddRequest("POST", "/v1/keys", DEEP, {}), "not JSON"),
        (OddRequest("PUT", "/v1/policies/1", DEEP, {}), "not multipart"),
        (OddRequest("POST", "/v1/collections", SURROGATE, {}), "not JSON"),
        (OddRequest("PUT", "/v1/policies/1", b"x", NO_BOUNDARY), "not multipart"),
        (OddRequest("PUT", "/v1/policies/" + "1" * 5000, b"{}", {}), "is not a whole number"),
        (OddRequest("GET", f"/v1/collections/{'x' * 5000}/rollouts", b"", {}), "no collection"),
        (OddRequest("GET", "/v1/nothing", b"", {}), "Not Found"),
    ],
    ids=lambda value: value.path[:40] if isinstance(value, OddRequest) else value,
)
async def test_what_was_a_bare_500_is_a_line(running, odd, said):
    status, body = await asyncio.to_thread(ask, running.url, TOKEN, odd)
    assert 400 <= status < 500
    check_answer(status, body, str(running.node.root))
    assert said in json.loads(body)["error"]


async def test_a_cursor_of_thousands_of_digits_is_none(running):
    await running.call(running.client.start_collection, counter_request())
    odd = OddRequest("GET", f"/v1/collections/c1/rollouts?after={'1' * 5000}", b"", {})
    status, body = await asyncio.to_thread(ask, running.url, TOKEN, odd)
    assert (status, "is not a cursor of c1" in json.loads(body)["error"]) == (400, True)
