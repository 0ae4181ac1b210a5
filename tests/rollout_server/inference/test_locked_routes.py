"""The routes for developers of a vLLM server that can sleep are not for whoever reaches its port."""

import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from fastapi.testclient import TestClient

from rollout_server.inference.locked_routes import NeedsKey


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "key")
    paths = ("/health", "/metrics", "/version", "/sleep", "/wake_up", "/collective_rpc", "/v1/models")
    app = FastAPI()
    for path in paths:
        app.add_route(path, lambda request: PlainTextResponse("answered"))
    app.add_middleware(NeedsKey)  # as vLLM 0.32 adds a class named by --middleware
    return TestClient(app)


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/collective_rpc", "/v1/models", "/not-there"])
def test_a_route_for_developers_needs_the_key(server, path):
    for headers in (
        {},
        {"Authorization": "Bearer other"},
        {"Authorization": "key"},
        {"Authorization": "Bearer \u00e9"},
    ):
        assert server.get(path, headers={k: v.encode() for k, v in headers.items()}).status_code == 401
    assert server.get(path, headers={"Authorization": "Bearer key"}).status_code == (404 if "not" in path else 200)


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version"])
def test_what_says_how_the_server_does_needs_none(server, path):
    assert server.get(path).text == "answered"
