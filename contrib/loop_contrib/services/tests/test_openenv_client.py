"""Our client on an OpenEnv server as its template writes it: no Task API, one session."""

import asyncio
import json
import logging

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agent_environments.protocol import EnvironmentCrashed, create_pool
from support.adapter_support import word_spans
from support.episodes import begun_episode, open_pool


class OneSession:
    """Guess a number, which the seed is; the refusal of a session comes before or after the client's first word."""

    def __init__(self, refuses_late):
        self.refuses_late = refuses_late
        self.open, self.most, self.refused = 0, 0, 0

    def routes(self):
        routes = [web.get("/ws", self.play), web.get("/health", self.health)]
        return [*routes, web.get("/list_environments", self.not_implemented)]

    async def not_implemented(self, request):
        return web.json_response({"detail": "no Task API"}, status=501)

    async def health(self, request):
        return web.json_response({"status": "healthy"})

    async def play(self, request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.open:
            self.refused += 1
            if self.refuses_late:
                await socket.receive()
            data = {"message": "Server at capacity: 1/1 sessions active.", "code": "CAPACITY_REACHED"}
            await socket.send_json({"type": "error", "data": data})
            await socket.close()
            return socket
        self.open += 1
        self.most = max(self.most, self.open)
        secret = None
        try:
            async for message in socket:
                told = json.loads(message.data)
                if told["type"] == "state":
                    await socket.send_json({"type": "state", "data": {}})
                    continue
                if told["type"] == "reset":
                    secret = told["data"]["seed"]
                right = told["type"] == "step" and told["data"]["action"] == str(secret)
                observation = {"text": "Yes." if right else "Guess."}
                data = {"observation": observation, "reward": float(right), "done": right}
                await socket.send_json({"type": "observation", "data": data})
        finally:
            self.open -= 1
        return socket


@pytest.fixture
async def serving():
    """Serves a service by its ``routes``; gives its address."""
    servers = []

    async def start(service):
        app = web.Application()
        app.add_routes(service.routes())
        servers.append(TestServer(app))
        await servers[-1].start_server()
        return service, str(servers[-1].make_url("")).rstrip("/")

    yield start
    for server in servers:
        await server.close()


@pytest.fixture
def serve(serving):
    return lambda refuses_late=False: serving(OneSession(refuses_late))


def pool_on(url, **options):
    return create_pool("openenv", {"url": url, "dataset": "guessing", **options}, word_spans)


async def test_a_service_without_tasks_needs_splits(serve):
    _, url = await serve()
    with pytest.raises(EnvironmentCrashed, match="it has no Task API: set splits to ranges of its seeds"):
        await pool_on(url).open()


@pytest.mark.parametrize("refuses_late", [False, True])
async def test_episodes_wait_for_the_one_session_and_none_is_lost(serve, monkeypatch, refuses_late):
    monkeypatch.setattr("loop_contrib.services.openenv_client.PLACE_PAUSE_S", 0.01)
    monkeypatch.setattr("agent_environments.lost_worlds.PAUSE_S", 0.01)
    service, url = await serve(refuses_late)
    async with open_pool(pool_on(url, splits={"train": [3, 8], "dev": [8, 9]}, start_timeout_s=5.0)) as pool:
        assert (pool.tasks("train")[0], pool.tasks("dev")) == ("seed_3", ["seed_8"])

        async def play(task):
            async with begun_episode(pool, task) as environment:
                assert not (await environment.step("no")).done
                await asyncio.sleep(0)
                assert (await environment.step(task.removeprefix("seed_"))).done
                grade = await environment.grade()
            return grade.reward

        assert await asyncio.gather(*map(play, pool.tasks("train"))) == [1.0] * 5
        assert (service.most, service.refused > 0, pool.crowded) == (1, True, True)
        assert not pool.status().open_worlds


async def test_a_session_that_somebody_else_keeps_is_waited_for_only_so_long(serve, monkeypatch):
    monkeypatch.setattr("loop_contrib.services.openenv_client.PLACE_PAUSE_S", 0.01)
    monkeypatch.setattr("agent_environments.lost_worlds.PAUSE_S", 0.01)
    service, url = await serve()
    service.open = 1
    async with open_pool(pool_on(url, splits={"train": [3, 4]}, start_timeout_s=0.3)) as pool:
        environment = await pool.acquire("e")
        with pytest.raises(EnvironmentCrashed, match="no sessions left"):
            await environment.start("seed_3")
        assert await pool.answers()
        await environment.close()


class Typed:
    """A server of which `/schema` names the fields, and which refuses actions that its type does not take."""

    def __init__(self, schema=None, draws=lambda number, data: data.get("seed")):
        self.schema = schema
        self._draws = draws
        self.resets = []
        self.actions = []

    def routes(self):
        return [web.get("/ws", self.play), web.get("/schema", self.described)]

    async def described(self, request):
        return web.json_response(self.schema, status=404 if self.schema is None else 200)

    async def play(self, request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            told = json.loads(message.data)
            answer = self.answer(told["type"], told.get("data", {}))
            await socket.send_json(answer)
        return socket

    def answer(self, kind, data):
        if kind == "state":
            return {"type": "state", "data": {"grade": "B"}}
        if kind == "reset":
            self.resets.append(data)
            observation = {"hint": f"Task {self._draws(len(self.resets), data)}.", "messages": [{"sender_id": 0}]}
            return {"type": "observation", "data": {"observation": observation, "reward": None, "done": False}}
        self.actions.append(data)
        if "move" not in data:
            return self.refusal("missing", ["move"], "Field required")
        if data["move"] not in ("up", "down"):
            return self.refusal("literal_error", ["move"], "Input should be 'up' or 'down'")
        right = data["move"] == "up"
        data = {"observation": {"hint": "Moved.", "failed": None}, "reward": float(right), "done": right}
        return {"type": "observation", "data": data}

    def refusal(self, kind, where, words):
        errors = [{"type": kind, "loc": where, "msg": words}]
        return {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}}


OBSERVED = {"type": "object", "properties": {"hint": {}, "done": {}, "reward": {}, "metadata": {}}}


def taken(*needed, **more):
    return {
        "type": "object",
        "properties": {"metadata": {}, **{name: {} for name in [*needed, *more]}},
        "required": needed,
    }


@pytest.fixture
def typed(serving):
    return lambda *arguments, kind=Typed: serving(kind(*arguments))


FIELDS = {"action_field": "move", "observation_field": "hint"}


@pytest.mark.parametrize("refused", ["I go UP.", "UP", "up\n", "", "{}", "go", "0", " up", "left", "up down"])
async def test_a_refused_action_is_an_observation_with_the_servers_own_words(typed, refused):
    _, url = await typed()
    async with open_pool(pool_on(url, splits={"train": [0, 2]}, **FIELDS)) as pool:
        environment = await pool.acquire("e")
        assert [message.content for message in await environment.start("seed_0")] == ["Task 0."]
        step = await environment.step(refused)
        assert (step.done, step.failed, step.broke) == (False, True, None)
        assert step.observation == "Execution failed. Invalid message; move: Input should be 'up' or 'down'"
        step = await environment.step("up")
        assert (step.observation, step.done, step.failed) == ("Moved.", True, False)
        grade = await environment.grade()
        assert (grade.reward, grade.broke, grade.ungradable) == (1.0, None, None)
        await environment.close()


async def test_a_wrong_field_of_actions_is_no_fault_of_the_policy(typed):
    _, url = await typed()
    async with (
        open_pool(pool_on(url, splits={"train": [0, 2]}, observation_field="hint")) as pool,
        begun_episode(pool, "seed_0") as environment,
    ):
        step = await environment.step("up")
        assert step.done
        assert "move: Field required; set action_field" in step.broke.what


@pytest.mark.parametrize(
    ("schema", "options", "why"),
    [
        (
            {"observation": OBSERVED, "action": taken("move")},
            {"action_field": "move"},
            "no 'text': set observation_field to hint\"",
        ),
        (
            {"observation": taken("tool_name", "result", "error")},
            {},
            "no 'text': set observation_field to tool_name or result or error",
        ),
        (
            {"observation": OBSERVED, "action": taken("move")},
            {"observation_field": "hint"},
            "need move beside 'action'",
        ),
        (
            {"observation": OBSERVED, "action": taken("x", "y")},
            FIELDS | {"action_field": "x"},
            "need y beside 'x': .* null",
        ),
        ({"action": taken(move=1, say=1)}, {}, "actions have no 'action': set action_field to move or say"),
        (
            {"observation": {**OBSERVED, "additionalProperties": True}},
            {},
            "no 'text': set observation_field to one of hint",
        ),
        (None, {}, "no 'text': set observation_field to one of hint, messages"),
    ],
)
async def test_the_fields_of_a_service_are_looked_at_as_it_opens(typed, schema, options, why):
    _, url = await typed(schema)
    with pytest.raises(EnvironmentCrashed, match=why):
        await pool_on(url, splits={"train": [0, 2]}, **options).open()


@pytest.mark.parametrize(
    "schema", [None, [], {}, {"action": None, "observation": []}, {"action": {"anyOf": []}}], ids=str
)
async def test_a_service_need_not_describe_itself(typed, schema):
    _, url = await typed(schema)
    pool = pool_on(url, splits={"train": [0, 2]}, **FIELDS)
    await pool.open()
    await pool.close()


async def test_an_action_of_several_fields_is_a_json_object(typed):
    service, url = await typed({"observation": OBSERVED, "action": taken("move", "say")})
    async with (
        open_pool(pool_on(url, splits={"train": [0, 2]}, observation_field="hint", action_field=None)) as pool,
        begun_episode(pool, "seed_0") as environment,
    ):
        shown = [(await environment.step(said)).observation for said in ("up", "[1]", '{"say": "hi"}')]
        assert shown[0].startswith("Execution failed. An action is a JSON object: ")
        assert shown[1:] == [
            "Execution failed. An action is a JSON object.",
            "Execution failed. Invalid message; move: Field required",
        ]
        assert (await environment.step('```json\n{"move": "up", "say": "hi"}\n```')).done
        assert service.actions == [{"say": "hi"}, {"move": "up", "say": "hi"}]


async def test_a_task_may_be_any_arguments_of_reset(typed):
    service, url = await typed(None, lambda _, data: data["fen"])
    async with open_pool(
        pool_on(url, splits={"train": [{"fen": "a"}, {"fen": "b", "depth": 2}]}, reset={"depth": 1}, **FIELDS)
    ) as pool:
        assert pool.tasks("train") == ["train_0", "train_1"]
        for task, text in (("train_0", "Task a."), ("train_1", "Task b.")):
            environment = await pool.acquire("e")
            assert [message.content for message in await environment.start(task)] == [text]
            await environment.close()
        assert service.resets == [{"depth": 1, "fen": "a"}, {"depth": 2, "fen": "b"}]
    with pytest.raises(EnvironmentCrashed, match=r"splits.train is .first, end. of its seeds, or a list of objects"):
        await pool_on(url, splits={"train": ["a", "b"]}, **FIELDS).open()


@pytest.mark.parametrize(
    ("draws", "told"),
    [
        (lambda _, data: data["seed"], ""),
        (lambda *_: "one", "opens seed_3 and seed_4 alike: if it does nothing with seeds, all its 5 tasks are one"),
        (lambda number, _: number, "opens seed_3 differently each time"),
    ],
)
async def test_seeds_that_do_nothing_are_told_of(typed, caplog, draws, told):
    _, url = await typed(None, draws)
    pool = pool_on(url, splits={"train": [3, 8]}, **FIELDS)
    await pool.open()
    await pool.close()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told in "".join(warnings)
    assert bool(told) == bool(warnings)


class Tools(Typed):
    """An environment of MCP tools, as OpenEnv's echo_env: it opens with no text, and shows what each action has."""

    def answer(self, kind, data):
        shown = {"result": None}
        match kind, data:
            case "reset", _:
                shown = {"metadata": {"status": "ready"}}
            case "step", {"type": "list_tools"}:
                shown = {"tools": [{"name": "echo"}]}
            case "step", {"tool_name": "echo", "arguments": arguments}:
                shown["result"] = {"content": [{"type": "text", "text": arguments["message"]}], "is_error": False}
            case "step", _:
                shown["error"] = {"message": "no such tool"}
        return {"type": "observation", "data": {"observation": shown, "reward": 0.0, "done": False}}


async def test_tools_of_mcp_are_called_by_json(typed):
    schema = {"observation": {"properties": {"result": {}, "error": {}}}, "action": taken("tool_name", "arguments")}
    _, url = await typed(schema, kind=Tools)
    options = {"observation_field": "result", "action_field": None, "instructions": "Echo."}
    async with open_pool(pool_on(url, splits={"train": [{}]}, **options)) as pool:
        environment = await pool.acquire("e")
        assert [(message.role, message.content) for message in await environment.start("train_0")] == [
            ("user", "Echo.")
        ]
        said = [
            '{"type": "list_tools"}',
            '{"tool_name": "echo", "arguments": {"message": "hi"}}',
            '{"tool_name": "cry"}',
        ]
        shown = [(await environment.step(each)).observation for each in said]
        assert shown == ['{"tools": [{"name": "echo"}]}', "hi", '{"error": {"message": "no such tool"}}']
        await environment.close()
