"""Models by their names on the hub, from a small server on loopback that speaks its routes."""

import json
import shutil
import threading
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest
from huggingface_hub import constants

from loop_formats.schema import ConfigError
from loop_recipes.config import loop_config
from loop_recipes.config.files import compose, pin_models
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.own_task.training import check_model
from model_families.weights import hub_fetch
from model_families.weights.hub import is_hub_name, local_path, model_folder, pinned
from support.model_folders import qwen2
from support.texts import texts_beside

TABLES = texts_beside(__file__)

SHARED = pytest.mark.fault("what is shared holds paths of this machine, or cannot be served as printed")
COMMITS = {"main": "a" * 40, "older": "b" * 40}


class Hub(ThreadingHTTPServer):
    """Serves ``files`` of the model ``me/small``, and counts what is asked."""

    daemon_threads = True

    def __init__(self, files):
        self.files, self.asked = files, []
        super().__init__(("127.0.0.1", 0), Routes)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Routes(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer(False)

    def do_GET(self):
        self.answer(True)

    def answer(self, whole):
        path = unquote(self.path.partition("?")[0]).strip("/")
        self.server.asked.append(path)
        parts = path.split("/")
        api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if api else parts[:2])
        revision = parts[5] if api and len(parts) > 5 else parts[3] if not api and len(parts) > 3 else "main"
        commit = COMMITS.get(revision, revision if revision in COMMITS.values() else None)
        if name == "me/gated":
            return self.send(403, b"{}", {"X-Error-Code": "GatedRepo"}, whole)
        if name == "me/broken":
            return self.send(503, b"{}", {}, whole)
        if name != "me/small":
            return self.send(401, b"{}", {"X-Error-Code": "RepoNotFound"}, whole)
        if commit is None:
            return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, whole)
        if api and parts[4:5] == ["tree"]:
            tree = [
                {"type": "file", "path": file, "size": len(body), "oid": sha1(body).hexdigest()}
                for file, body in self.server.files.items()
            ]
            return self.send(200, json.dumps(tree).encode(), {}, whole)
        if api:
            siblings = [{"rfilename": file} for file in self.server.files]
            return self.send(200, json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode(), {}, whole)
        body = self.server.files.get("/".join(parts[4:]))
        if body is None:
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound"}, whole)
        return self.send(200, body, {"ETag": f'"{sha1(body).hexdigest()}"', "X-Repo-Commit": commit}, whole)

    def send(self, status, body, headers, whole):
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if whole:
            self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = qwen2(tmp_path_factory.mktemp("model"))
    files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
    files["README.md"] = b"---\nlicense: apache-2.0\n---\n"
    unwanted = ["pytorch_model.bin", "consolidated.safetensors", "original/params.json", "onnx/model.onnx"]
    server = Hub(files | dict.fromkeys([*unwanted, "model.fp16.safetensors", "flax_model.msgpack"], b"{}"))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server, set(files)
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def here(served, tmp_path, monkeypatch):
    """The hub with an empty cache, in a folder of its own."""
    server, _ = served
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.chdir(tmp_path)
    model_folder.cache_clear()
    server.asked.clear()
    yield server
    model_folder.cache_clear()


def test_a_model_is_fetched_with_what_it_needs_and_no_more(served, here):
    folder = model_folder("me/small")
    assert {file.name for file in folder.iterdir()} == served[1]
    assert folder.name == COMMITS["main"]
    assert check_model("me/small") == folder


def test_a_name_is_pinned_to_a_commit_which_needs_no_network_any_more(here, monkeypatch):
    name = pinned("me/small@older")
    assert name == f"me/small@{COMMITS['older']}"
    assert pinned(name) == name
    model_folder.cache_clear()
    here.asked.clear()
    assert model_folder(name).name == COMMITS["older"]
    assert here.asked == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model_folder.cache_clear()
    assert model_folder(name).name == COMMITS["older"]
    assert model_folder("me/small@older").name == COMMITS["older"]


def test_a_folder_of_that_name_wins(here, tmp_path):
    (tmp_path / "me" / "small").mkdir(parents=True)
    assert not is_hub_name("me/small")
    assert not is_hub_name("me/other"), "a path whose folder is here is a path"
    assert pinned("me/small") == "me/small"
    assert here.asked == []


@pytest.mark.parametrize("name", TABLES["what_is_no_name_of_the_hub_is_a_path"])
def test_what_is_no_name_of_the_hub_is_a_path(here, name):
    assert not is_hub_name(name)
    with pytest.raises(ConfigError, match=r"(small|c|me|@) holds no config\.json; download it") as raised:
        check_model(name)
    assert "\n" not in str(raised.value)
    assert here.asked == []


@pytest.mark.parametrize(("name", "why"), TABLES["what_the_hub_refuses_is_one_line"])
def test_what_the_hub_refuses_is_one_line(here, name, why):
    with pytest.raises(ValueError, match=why) as raised:
        model_folder(name)
    assert "\n" not in str(raised.value)


def test_pickles_are_not_fetched(here, monkeypatch):
    monkeypatch.setattr(here, "files", {"config.json": b"{}", "pytorch_model.bin": b"gigabytes"})
    with pytest.raises(
        ValueError, match=r"me/small has its weights as pickles alone .*`hf download me/small"
    ) as raised:
        model_folder("me/small")
    assert "\n" not in str(raised.value)
    assert not any("pytorch_model.bin" in asked for asked in here.asked)


def test_offline_takes_the_cache_alone(here, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"me/small is not a folder here, and not in .*HF_HUB_OFFLINE"):
        model_folder("me/small")
    assert here.asked == []


def test_no_network_is_one_line(here, monkeypatch):
    closed = "http://127.0.0.1:9"
    monkeypatch.setattr(constants, "ENDPOINT", closed)
    with pytest.raises(ValueError, match=rf"small is not a folder here, and cannot be fetched from {closed}") as raised:
        model_folder("me/small")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["me/small", "me/small@older"])
def test_trainer_and_node_of_a_config_are_given_one_snapshot(here, name):
    """The composed config holds what was asked for and the commit; what reads it has the folder."""
    config = compose("tiny_cpu", [f"model.path={name}", "model.lora_rank=4"])
    words = pin_models(config)
    assert words == [f"model.path=me/small@{COMMITS[name.partition('@')[2] or 'main']}"], "the node's refers to it"
    assert config == compose("tiny_cpu", [f"model.path={name}", "model.lora_rank=4", *words])
    model_folder.cache_clear()
    here.asked.clear()
    read = read_config(config, LoopConfig)
    assert read.base_model == read.node.model.path == str(model_folder(config.model.path))
    assert here.asked == []
    assert pin_models(config) == words


def test_a_config_that_names_none_is_one_line_that_names_the_key(here):
    with pytest.raises(ConfigError, match=r"^model\.path: me/none is not a folder here") as raised:
        pin_models(compose("tiny_cpu", ["model.path=me/none"]))
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"node\.model\.path.*me/none is not a folder here"):
        read_config(compose("tiny_cpu", ["node.model.path=me/none"]), LoopConfig)


@pytest.mark.parametrize(("files", "needed"), TABLES["one_set_of_weights_and_what_is_beside_it_is_needed"])
def test_one_set_of_weights_and_what_is_beside_it_is_needed(files, needed):
    assert list(hub_fetch._needed(files)) == (files if needed is None else needed)


def closed_port(here, cache, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


def unavailable(here, cache, monkeypatch):
    monkeypatch.setattr(Routes, "answer", lambda self, whole: self.send(503, b"{}", {}, whole))


def line_end(here, cache, monkeypatch):
    (cache / "refs/main").write_text(COMMITS["main"] + "\n")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def no_refs(here, cache, monkeypatch):
    shutil.rmtree(cache / "refs")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@SHARED
@pytest.mark.parametrize("change", [closed_port, unavailable, line_end, no_refs])
def test_a_model_that_was_fetched_is_there_without_the_hub(here, tmp_path, monkeypatch, change):
    folder = model_folder("me/small")
    model_folder.cache_clear()
    change(here, tmp_path / "cache/models--me--small", monkeypatch)
    assert model_folder("me/small") == folder


@SHARED
def test_a_cache_that_has_gone_is_known_by_its_name(here, tmp_path):
    folder = model_folder("me/small")
    shutil.rmtree(tmp_path / "cache")
    model_folder.cache_clear()
    assert local_path(str(folder)) == str(folder)
    assert (folder / "config.json").is_file(), "fetched again, by its commit"


@SHARED
def test_a_runs_files_keep_the_name_and_the_commit(here, tmp_path):
    config = read_config(compose("tiny_cpu", ["model.path=me/small", "model.lora_rank=4"]), LoopConfig)
    kept, name = loop_config.keys_to_keep(config), f"me/small@{COMMITS['main']}"
    assert kept["model"]["path"] == kept["node"]["model"]["path"] == name
    assert str(tmp_path / "cache") not in str(kept)
