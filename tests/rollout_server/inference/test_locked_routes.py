"""The routes of a vLLM server are not for whoever reaches its port."""

import logging

import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from fastapi.testclient import TestClient

from rollout_server.config import ModelConfig, ServersConfig
from rollout_server.inference.command import server_command
from rollout_server.inference.locked_routes import OPEN_ROUTES, NeedsKey
from support.random_policy import write_model


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


@pytest.fixture
def level_of_logs():
    """vLLM's app sets that of all loggers."""
    before = logging.root.level
    yield
    logging.root.setLevel(before)


@pytest.mark.usefixtures("level_of_logs")
@pytest.mark.integration
@pytest.mark.attack
@pytest.mark.fault("vLLM samples for whoever reaches its port")
@pytest.mark.parametrize("developers", ["0", "1"])
@pytest.mark.parametrize("share", [None, "trainer"])
def test_every_route_of_the_installed_vllm_needs_the_key(share, developers, tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setenv("VLLM_API_KEY", "key")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", developers)
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    write_model(tmp_path / "model")
    model = ModelConfig(path=str(tmp_path / "model"), dtype="float32", max_context=128, lora_rank=8)
    words = server_command(model, ServersConfig(share=share), 1, cpu=True)
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(words[words.index("--model") :])
    app = build_app(parsed, ("generate",))
    client = TestClient(app, raise_server_exceptions=False)
    routes = {route.path for route in app.routes}
    assert {"/invocations", "/tokenize", "/load", "/v1/completions", "/openapi.json", *OPEN_ROUTES} <= routes
    refused = {path for path in routes for method in ("GET", "POST") if client.request(method, path).status_code == 401}
    assert routes - refused <= set(OPEN_ROUTES)
    for path in (*routes, "//health", "/health/", "/Health", "/health/../invocations", "/metrics/../load", "/%68ealth"):
        answer = client.post(path, headers={"Authorization": "Bearer"}, json={})
        assert answer.status_code == 401 or answer.url.path in OPEN_ROUTES, path
