"""Evaluation of a model behind a chat endpoint: a scripted service over real HTTP, the counter environment."""

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from omegaconf import OmegaConf

from agent_environments.protocol import Message
from eval_appworld import EvalAppWorldRecipe
from loop_contrib import chat_client
from loop_contrib.endpoint_evaluation.endpoint import EndpointEpisodes
from loop_contrib.endpoint_evaluation.endpoint_client import EndpointClient
from loop_formats.collection_request import MAX_ATTEMPTS, CollectionRequest
from loop_formats.run_files import read_rollouts
from loop_formats.schema import ConfigError
from loop_recipes.config.loop_config import EndpointConfig
from loop_recipes.evaluation.collect import EvaluationTimeout, NoScore
from rollout_server.collecting.compaction import SUMMARY_HEAD, SUMMARY_REQUEST
from rollout_server.config import EnvironmentConfig
from support.random_policy import write_model
from support.small_runs import set_up
from support.viewer_run import opened

KEY = "sk-secret"


class ChatService:
    """``speak(body)`` is the assistant's text or fields of its answer, ``fault(body)`` a status and text, or None.

    What ``holds(body)`` is not answered before the service ends.
    """

    def __init__(self):
        self.bodies: list[dict] = []
        self.keys: set[str | None] = set()
        self.speak = lambda body: "```python\nfinish()\n```"
        self.fault = lambda body: None
        self.holds = lambda body: False
        self.ended = asyncio.Event()

    async def complete(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.keys.add(request.headers.get("Authorization"))
        if self.holds(body):
            await self.ended.wait()
        fault = self.fault(body)
        if fault is not None:
            return web.Response(status=fault[0], text=fault[1], headers={"Retry-After": "0"})
        words = sum(len(message["content"].split()) for message in body["messages"])
        said = self.speak(body)
        said = said if isinstance(said, dict) else {"content": said}
        ended = said.pop("finish_reason", "stop")
        return web.json_response(
            {
                "choices": [{"message": {"role": "assistant", **said}, "finish_reason": ended}],
                "usage": {"prompt_tokens": words, "completion_tokens": 7},
            }
        )


@asynccontextmanager
async def serving():
    service = ChatService()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", service.complete)
    async with TestServer(app) as server:
        service.url = str(server.make_url("/v1"))
        try:
            yield service
        finally:
            service.ended.set()


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(chat_client, "FIRST_PAUSE_S", 0.01)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    write_model(folder / "model")
    return folder / "model"


def config(model, folder, url, **changes):
    node = {"root": str(folder / "node"), "model": {"path": str(model)}, "environment": {"name": "counter"}}
    return OmegaConf.create(
        {
            "output_dir": str(folder),
            "policies": [{"name": "gpt", "endpoint": {"url": url, "model": "some-model", "request": {"seed": None}}}],
            "rollout_node": {"launch": True},
            "node": node,
            "limits": {"max_turns": 4, "max_tokens_per_turn": 64, "max_context": 1000, "episode_deadline_s": 300},
            "split": "dev",
            "samplings": [{"temperature": 0.0, "runs": 2}],
            "statistics": {"resamples": 200},
            **changes,
        }
    )


FINISH = "```python\nfinish()\n```"


@pytest.mark.parametrize(
    ("said", "text", "reasoning", "cut"),
    [
        (f"<think>\nadd(1)\n</think>\n\n{FINISH}", FINISH, "add(1)", False),
        ("<think>\nadd(1)", "", "add(1)", True),
        ({"content": FINISH, "reasoning_content": "add(1)"}, FINISH, "add(1)", False),
        ({"content": None, "reasoning": "add(1)", "finish_reason": "length"}, "", "add(1)", True),
        (FINISH, FINISH, "", False),
    ],
)
async def test_what_an_endpoint_thinks_is_no_action(said, text, reasoning, cut):
    async with serving() as service, aiohttp.ClientSession() as session:
        service.speak = lambda body: said if isinstance(said, str) else dict(said)
        endpoint = EndpointConfig(url=service.url, model="m")
        request = CollectionRequest("c", ["reach3_1"], 1, 0)
        policy_client = EndpointClient(chat_client.ChatClient(session, service.url), endpoint, request)
        policy_client.begin("e", [Message("user", "Go.")])
        turn = await policy_client.speak(seed=1)
    assert (turn.text, turn.reasoning, turn.turn.cut_in_thinking) == (text, reasoning, cut)


def evaluate(cfg):
    recipe = EvalAppWorldRecipe(cfg)
    with set_up(recipe):
        recipe.evaluate()
    folder = Path(cfg.output_dir)
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return json.loads((folder / "report.json").read_text()), lines


def count_to(target):
    """Say one step a turn: what a model does that reads the conversation."""

    def speak(body):
        said = sum(message["role"] == "assistant" for message in body["messages"])
        return f"```python\nadd({target})\n```" if said == 0 else "```python\nfinish()\n```"

    return speak


async def test_a_whole_evaluation_without_a_node(model, tmp_path):
    async with serving() as service:
        service.speak = count_to(4)
        report, lines = await asyncio.to_thread(evaluate, config(model, tmp_path / "out", service.url))
    (score,) = report["scores"]
    assert score["success"]["mean"] == pytest.approx(100 / 6)  # dev asks for 4, 6, 8 and 10, 12, 14
    assert score["interactions"] == 2.0
    assert len(lines) == 12
    assert {line["sampled_tokens"] for line in lines} == {14}
    assert service.keys == {f"Bearer {KEY}"}
    first = service.bodies[0]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("some-model", 0.0, 64)
    assert "seed" not in first
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    text = (tmp_path / "out/report.md").read_text()
    assert f"policy gpt: some-model at {service.url}" in text
    everything = "".join(path.read_text() for path in (tmp_path / "out").rglob("*.*") if path.is_file())
    assert KEY not in everything
    shown = opened(tmp_path / "out", model)
    (collection,) = shown.overview()["collections"]
    assert collection["totals"] == {"rollouts": 12, "reward": pytest.approx(score["reward"]), "success": 1 / 6}
    assert len(shown.rollout(collection["id"], 1)["messages"]) == 6


async def test_a_busy_service_is_asked_again_and_a_refusal_is_a_named_failure(model, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(chat_client, "WARN_AFTER_S", 0.0)
    async with serving() as service:
        service.speak = count_to(4)
        tries: dict[str, int] = {}

        def fault(body):
            task = body["messages"][1]["content"]
            tries[task] = tries.get(task, 0) + 1
            if "to 14." in task:
                return 400, "no such thing"
            return (429, "slow down") if tries[task] <= 2 else None

        service.fault = fault
        cfg = config(model, tmp_path / "out", service.url, retries=1, samplings=[{"runs": 1}])
        report, _ = await asyncio.to_thread(evaluate, cfg)
        (score,) = report["scores"]
        assert score["success"]["mean"] == pytest.approx(100 / 5)
        ((task, run, reason),) = score["lost"]
        assert (task, run) == ("reach10_3", 0)
        assert "answers 400: no such thing" in reason
        assert tries["Task: Bring the counter from 0 to 14."] == MAX_ATTEMPTS + 1
        assert f"{MAX_ATTEMPTS + 1} of them at task reach10_3" in caplog.text
        assert caplog.text.count("/chat/completions answers 429: slow down") == 5, (
            "once for two refusals, in five tasks"
        )
        # The same command tries the failed task again, and only it.
        service.fault = lambda body: None
        asked = len(service.bodies)
        report, _ = await asyncio.to_thread(evaluate, cfg)
        assert report["scores"][0]["lost"] == []
        assert len(service.bodies) == asked + 2


async def test_where_everything_is_lost_there_is_no_score(model, tmp_path):
    async with serving() as service:
        service.speak = lambda body: "```python\nadd(1)\n```"
        service.fault = lambda body: (400, "no such thing") if len(body["messages"]) > 2 else None
        cfg = config(model, tmp_path / "out", service.url, samplings=[{"runs": 1}])
        with pytest.raises(NoScore, match=r"no score of gpt, T=0: all 6 rollouts lost, such as .* 400: no such thing"):
            await asyncio.to_thread(evaluate, cfg)
        assert not (tmp_path / "out/report.json").exists()
        service.fault = lambda body: None
        report, _ = await asyncio.to_thread(evaluate, cfg)
        assert report["scores"][0]["lost"] == []


async def test_budgets_end_an_episode_as_over_budget(model, tmp_path):
    async with serving() as service:
        service.speak = lambda body: "```python\nadd(1)\n```"
        report, lines = await asyncio.to_thread(evaluate, config(model, tmp_path / "turns", service.url))
        assert {(line["end_reason"], line["turns"]) for line in lines} == {("turn_limit", 4)}
        assert len(report["scores"][0]["over_budget"]) == 12

        def full(body):
            long = len(body["messages"]) > 4
            return (400, "This model's maximum context length is 10 tokens") if long else None

        service.fault = full
        _, lines = await asyncio.to_thread(evaluate, config(model, tmp_path / "context", service.url))
        assert {(line["end_reason"], line["turns"]) for line in lines} == {("context_limit", 2)}


async def test_the_history_of_an_endpoints_episode_is_shortened_by_the_same_rule(model, tmp_path):
    def speak(body):
        return "add one" if body["messages"][-1]["content"] == SUMMARY_REQUEST else "```python\nadd(1)\n```"

    limits = {"max_turns": 9, "max_tokens_per_turn": 10, "max_context": 110, "compaction": "summary"}
    async with serving() as service:
        service.speak = speak
        _, lines = await asyncio.to_thread(evaluate, config(model, tmp_path, service.url, limits=limits))
    assert {(line["end_reason"], line["turns"]) for line in lines} == {("turn_limit", 9)}
    asked = [body["messages"] for body in service.bodies if len(body["messages"]) > 2]
    begun = [messages for messages in asked if messages[2]["role"] == "user"]
    assert begun
    assert {messages[2]["content"] for messages in begun} == {f"{SUMMARY_HEAD}add one"}
    (log,) = tmp_path.rglob("collections/*.jsonl")
    first, second, *_ = read_rollouts(log)
    assert (first.episode_id, first.turns[-1].summary) == (second.episode_id, True)
    assert second.extra["compaction"] == "summary"
    assert sum(rollout.extra["completion_tokens"] for rollout in read_rollouts(log)) == 12 * 9 * 7
    assert "110 tokens of context (compaction: summary)" in (tmp_path / "report.md").read_text()


def deadlines():
    """In seconds, longer and longer, for what shall happen before one of them passes however slow the machine is."""
    return [0.5 * 2**number for number in range(10)]


async def test_out_of_time_goes_on_later(model, tmp_path):
    def first(body):
        return "from 0 to 4." in body["messages"][1]["content"]

    async with serving() as service:
        service.holds = lambda body: not first(body)
        cfg, journal = config(model, tmp_path / "out", service.url), tmp_path / "out/journal.jsonl"
        for deadline_s in deadlines():
            with pytest.raises(EvaluationTimeout, match="start the same evaluation again"):
                await asyncio.to_thread(evaluate, OmegaConf.merge(cfg, {"deadline_s": deadline_s}))
            if journal.read_text().count('"task_id"') == 2:
                break
        service.holds = lambda body: False
        service.bodies.clear()
        report, lines = await asyncio.to_thread(evaluate, cfg)
        assert len(lines) == 12
        assert report["scores"][0]["lost"] == []
        assert not any(map(first, service.bodies)), "both runs of the first task were done and are kept"


@pytest.mark.parametrize(("status", "most"), [(200, 99), (401, 2), (403, 2), (404, 2)])
async def test_a_service_that_never_answers_is_one_line_at_its_first_refusal(model, tmp_path, status, most):
    """It was nine attempts a task, and a TGC of 0.0 with status 0."""
    async with serving() as service:
        service.fault = lambda body: (status, '{"error": {"message": "wrong\\nkey"}}')
        cfg = config(model, tmp_path / "out", service.url)
        cfg.policies[0].endpoint.max_concurrent = 1
        with pytest.raises(ConfigError, match=f"answers {status}.*: wrong key; correct endpoint.url") as refused:
            await asyncio.to_thread(evaluate, cfg)
        assert len(service.bodies) <= most, "the next may be on its way already"
    assert "\n" not in str(refused.value)
    assert KEY not in str(refused.value)
    assert not (tmp_path / "out/report.json").exists()


@pytest.mark.parametrize("ending", ["\r", "\n", "\r\n", " "])
async def test_a_keys_line_end_is_not_of_it(model, tmp_path, monkeypatch, ending):
    monkeypatch.setenv("OPENAI_API_KEY", KEY + ending)
    async with serving() as service:
        await asyncio.to_thread(evaluate, config(model, tmp_path / "out", service.url))
    assert service.keys == {f"Bearer {KEY}"}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("sk-s\u00e9cret", "OPENAI_API_KEY must hold printable ASCII"),
        (None, "OPENAI_API_KEY must hold the endpoint's key"),
    ],
    ids=["no header carries it", "it is missing"],
)
def test_a_key_that_cannot_be_sent_is_one_clear_line(model, tmp_path, monkeypatch, key, said):
    monkeypatch.setenv("OPENAI_API_KEY", key) if key else monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ConfigError, match=said) as refused:
        EvalAppWorldRecipe(config(model, tmp_path / "out", "http://127.0.0.1:1/v1"))
    assert "cret" not in str(refused.value)


def test_an_address_where_nothing_listens_is_one_clear_line_at_the_start(model, tmp_path):
    recipe = EvalAppWorldRecipe(config(model, tmp_path / "out", "http://127.0.0.1:1/v1"))
    try:
        with pytest.raises(
            ConfigError, match=r"endpoint\.url http://127\.0\.0\.1:1/v1 gives no answer .*; start the"
        ) as error:
            recipe.setup()
    finally:
        recipe.cleanup()
    assert "\n" not in str(error.value)


def episodes_of(model, folder):
    return EndpointEpisodes(EnvironmentConfig("counter"), str(model), folder)


def test_closing_ends_the_pool_once_and_hides_no_error(model, tmp_path):
    episodes = episodes_of(model, tmp_path)
    closed = []

    async def close():
        closed.append(True)
        raise RuntimeError("the fork server does not end")

    episodes._pool.close = close
    with pytest.raises(RuntimeError, match="the fork server does not end"):
        episodes.close()
    episodes.close()
    assert closed == [True]


async def test_an_evaluation_out_of_time_closes_its_worlds(model, tmp_path):
    async with serving() as service:
        service.holds = lambda body: True

        def run(deadline_s):
            recipe = EvalAppWorldRecipe(config(model, tmp_path / "out", service.url, deadline_s=deadline_s))
            with set_up(recipe):
                with pytest.raises(EvaluationTimeout):
                    recipe.evaluate()
                return recipe._endpoints._pool.status().open_worlds

        for deadline_s in deadlines():
            assert await asyncio.to_thread(run, deadline_s) == 0
            if service.bodies:
                break
        assert service.bodies
