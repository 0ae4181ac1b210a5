"""Whole collections that a program plays: the node over real HTTP, its vLLM scripted, the counter as the world."""

import asyncio
import dataclasses
import re
import sys

import aiohttp
import openai
import pytest

from agent_environments.counter import CounterEnvironment
from agent_environments.harness.worker import play_episodes
from agent_environments.protocol import Grade, StepResult
from loop_formats.collection_request import Limits
from rollout_server.client import RolloutNodeError
from rollout_server.endpoint import harness_episode
from support.counter_node import TOKEN, counter_request, local_node
from support.texts import texts_beside
from support.waiting import DEADLINE_S, pass_time, wait_until

AGENT = [sys.executable, "-m", "agent_environments.harness.chat_agent"]
TEXTS = texts_beside(__file__)
SAME = TEXTS["same"]
SUB_AGENTS = TEXTS["sub_agents"]


def harness(**config):
    return {"name": "harness", "command": AGENT, "world": {"name": "counter"}, **config}


def request(**changes):
    return counter_request(**{"tasks": ["reach3_1", "reach5_1"], "rollouts_per_task": 2, **changes})


def told(rollouts):
    """What a rollout says of its episode, times left out."""
    turns = ("start", "end", "policy_version", "finish_reason", "message")
    return sorted(
        [getattr(rollout, name) for name in SAME] + [[getattr(turn, name) for name in turns] for turn in rollout.turns]
        for rollout in rollouts
    )


async def test_the_agent_of_forty_lines_plays_what_the_nodes_own_loop_plays(policy, tmp_path):
    """Token for token, with the same log-probs, rewards and reasons to end."""
    stories = []
    for name, environment in (("own", {"name": "counter"}), ("harness", harness())):
        async with local_node(policy, tmp_path / name, environment=environment) as running:
            rollouts, end = await running.collect(request())
            assert (end.reason, end.finished) == ("complete", 4)
            stories.append(told(rollouts))
    assert stories[0] == stories[1]
    assert {rollout.segments for rollout in rollouts} == {1}
    assert all(rollout.extra["harness"]["exit_status"] == 0 for rollout in rollouts)


async def test_a_program_shortens_its_history_itself(policy, tmp_path):
    async with local_node(policy, tmp_path, environment=harness()) as running:
        limits = dataclasses.replace(request().limits, compaction="drop")
        with pytest.raises(RolloutNodeError, match="compaction must be null"):
            await running.collect(request(limits=limits))


async def test_an_episode_of_three_sequences_is_delivered_whole_and_counts_once(policy, tmp_path):
    config = {"command": [sys.executable, "-c", SUB_AGENTS], "world": None, "tasks": {"train": ["t_1"]}}
    config["grade_command"] = [sys.executable, "-c", "print('{\"reward\": 0.5}')"]
    async with local_node(policy, tmp_path / "node", environment={"name": "harness", **config}) as running:
        rollouts, end = await running.collect(request(tasks=["t_1"], rollouts_per_task=2, seed=4))
        assert end.finished == 2
        assert await running.call(running.client.tasks, "train")
    assert [(rollout.segment, rollout.segments, rollout.reward) for rollout in rollouts] == [
        (number, 3, 0.5) for _ in range(2) for number in range(3)
    ]
    for first, *others in (rollouts[:3], rollouts[3:]):
        assert first.rollout_id == first.episode_id
        assert {rollout.episode_id for rollout in others} == {first.episode_id}
        assert sum(rollout.sampled_tokens for rollout in [first, *others]) == sum(
            map(sum, (r.mask for r in [first, *others]))
        )


async def test_a_rule_of_the_config_keeps_a_call_out_of_the_record(policy, tmp_path):
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    agent = SUB_AGENTS.replace("messages=messages)", "messages=messages, tools=tools)")
    agent = agent.replace("def ask(*texts):", "def ask(*texts, tools=openai.omit):")
    agent = agent.replace('ask("plan"),', f'ask("plan", tools=[{tool}]),')
    config = {"side_calls": [{"system": "never said"}, {"model": "m", "tools": []}]}
    config["command"] = [sys.executable, "-c", agent]
    async with local_node(policy, tmp_path / "node", environment=harness(**config)) as running:
        rollouts, _ = await running.collect(request(tasks=["reach3_1"], rollouts_per_task=1))
    [rollout] = rollouts
    calls = rollout.extra["harness"]["calls"]
    assert (len(rollout.turns), calls["answered"], calls["aside"]) == (1, 1, 2)


NEVER_ENDS = TEXTS["never_ends"]


async def test_a_program_that_never_ends_is_graded_when_its_time_is_used_up(policy, tmp_path):
    limits = Limits(max_turns=4, max_tokens_per_turn=64, max_context=1000, episode_deadline_s=2 * DEADLINE_S)
    environment = harness(command=[sys.executable, "-c", NEVER_ENDS])
    async with local_node(policy, tmp_path / "node", environment=environment) as running:
        collecting = asyncio.create_task(
            running.collect(request(tasks=["reach3_1"], rollouts_per_task=1, limits=limits))
        )
        await wait_until(lambda: any(session.turns for session in running.node.endpoint.sessions._sessions.values()))
        await pass_time(2 * DEADLINE_S)
        rollouts, _ = await collecting
        assert not len(running.node.endpoint.sessions)
    assert [(rollout.end_reason, len(rollout.turns)) for rollout in rollouts] == [("deadline", 1)]
    told = rollouts[0].extra["harness"]
    assert (told["exit_status"], told["output"]) == (None, "please log in\n")


LEAVES = TEXTS["leaves"]


@pytest.mark.fault("an agent that says it is done cuts a step in the middle, and the half of it is graded")
@pytest.mark.parametrize(
    "leave", ['post("/episode/finish", {})', "os._exit(0)", "os._exit(3)", "os.kill(os.getpid(), 9)"]
)
async def test_a_step_that_is_under_way_is_over_before_the_grade(policy, tmp_path, monkeypatch, leave):
    seen, begun = [], tmp_path / "begun"

    async def step(self, action):
        begun.touch()
        seen.append("hands over")
        await asyncio.sleep(0.5)
        seen.append("takes the money")
        return StepResult("", done=False)

    async def grade(self):
        seen.append("grade")
        return Grade(1.0, True)

    monkeypatch.setattr(CounterEnvironment, "step", step)
    monkeypatch.setattr(CounterEnvironment, "grade", grade)
    environment = harness(command=[sys.executable, "-c", LEAVES + leave, str(begun)])
    async with local_node(policy, tmp_path / "node", environment=environment) as running:
        rollouts, _ = await running.collect(request(tasks=["reach3_1"], rollouts_per_task=1))
    assert seen == ["hands over", "takes the money", "grade"]
    assert [rollout.end_reason for rollout in rollouts] == ["completed"]


LINGERS = TEXTS["lingers"]


@pytest.mark.fault("a program that has had its turns is waited for until its time is used up")
async def test_a_program_that_goes_on_after_its_last_turn_is_ended(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(harness_episode, "TURN_LIMIT_GRACE_S", 0.01)
    limits = Limits(max_turns=1, max_tokens_per_turn=64, max_context=1000, episode_deadline_s=2 * DEADLINE_S)
    environment = harness(command=[sys.executable, "-c", LINGERS])
    async with local_node(policy, tmp_path / "node", environment=environment) as running:
        rollouts, end = await running.collect(request(tasks=["reach3_1"], rollouts_per_task=1, limits=limits))
    assert [(rollout.end_reason, len(rollout.turns)) for rollout in rollouts] == [("turn_limit", 1)]
    assert rollouts[0].extra["harness"]["calls"]["refused.410"] == 1
    assert end.failures == {}


@pytest.mark.fault("a first prompt over the context is tried three times and told of in no number")
async def test_a_first_prompt_over_the_context_says_how_long_it_is_once(policy, tmp_path):
    long = NEVER_ENDS.replace(
        """b'{"messages": [{"role": "user"}]}'""",
        """b'{"messages": [{"role": "user", "content": "%s"}]}' % (b"word " * 5000)""",
    )
    environment = harness(command=[sys.executable, "-c", long])
    async with local_node(policy, tmp_path / "node", environment=environment) as running:
        _, end = await running.collect(request(tasks=["reach3_1"], rollouts_per_task=1))
        count = len(running.node.tokens.encode_text("word " * 5000))
    assert end.failures == {"request_refused": 1}
    [told] = re.findall(
        r"maximum context length is \d+ tokens. However, your messages resulted in (\d+) tokens", end.error
    )
    assert count < int(told) < count + 20


ONE_TURN = NEVER_ENDS.replace("time.sleep(600)", "")
DELETES_ITS_FOLDER = ONE_TURN + "import shutil; shutil.rmtree(os.environ['EPISODE_FOLDER'])"


@pytest.mark.parametrize(
    ("agent", "grader"),
    [
        (DELETES_ITS_FOLDER, "print('{\"reward\": 1.0}')"),
        (ONE_TURN, "print('{\"reward\": 1.5}')"),
        (ONE_TURN, "print('[' * 5000)"),
    ],
    ids=["no folder to grade in", "a reward that is none", "an answer that cannot be read"],
)
async def test_after_a_turn_a_grade_that_fails_is_no_second_try(policy, tmp_path, agent, grader):
    config = {"command": [sys.executable, "-c", agent], "world": None, "tasks": {"train": ["t_1"]}}
    config["grade_command"] = [sys.executable, "-c", grader]
    async with local_node(policy, tmp_path / "node", environment={"name": "harness", **config}) as running:
        [rollout], end = await running.collect(request(tasks=["t_1"], rollouts_per_task=1))
    assert (end.reason, end.failures) == ("complete", {})
    assert rollout.reward == 0.0
    assert rollout.ungradable is not None


async def test_turns_are_limited_by_environment(policy, tmp_path):
    mixed = {"name": "mixed", "environments": {"cnt": {"name": "counter"}}}
    turns = []
    for name, environment in (("own", mixed), ("harness", harness(world=mixed))):
        async with local_node(policy, tmp_path / name, environment=environment) as running:
            running.vllm.speak = lambda rng: "Still thinking."
            asked = request(tasks=["cnt/reach8_1"], rollouts_per_task=1, environment_turns={"cnt": 2})
            [rollout], _ = await running.collect(asked)
            turns.append((len(rollout.turns), rollout.end_reason))
    assert turns == [(2, "turn_limit")] * 2


async def test_a_program_that_dies_before_its_first_turn_is_tried_again_and_named(policy, tmp_path):
    environment = harness(command=[sys.executable, "-c", "raise SystemExit('no such model')"])
    async with local_node(policy, tmp_path / "node", environment=environment) as running:
        _, end = await running.collect(request(tasks=["reach3_1"], rollouts_per_task=1))
        assert not len(running.node.endpoint.sessions)
    assert end.failures == {"environment_error": 3}
    assert "no such model" in end.error


REFUSED = TEXTS["refused"]


async def test_an_episode_without_a_turn_says_what_its_program_was_refused_and_printed(policy, tmp_path):
    environment = harness(command=[sys.executable, "-c", REFUSED])
    async with local_node(policy, tmp_path / "node", environment=environment) as running:
        _, end = await running.collect(request(tasks=["reach3_1"], rollouts_per_task=1))
    assert "exit status 0; it was refused: 404 POST /v1/embeddings is not served here" in end.error
    assert "it printed 'gave up" in end.error


async def test_a_collection_that_ends_early_leaves_no_program_and_no_session(policy, tmp_path):
    environment = harness(command=[sys.executable, "-c", NEVER_ENDS])
    async with local_node(policy, tmp_path / "node", environment=environment) as running:
        await running.call(running.client.start_collection, request())
        while not running.vllm.requests:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)
        await running.call(running.client.cancel, "c1")
        run = await running.node.collection("c1")
        while not run.idle:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not len(running.node.endpoint.sessions)
        assert running.node.pool.status().open_worlds == 0


async def test_a_program_elsewhere_opens_an_episode_and_closes_it(policy, tmp_path):
    environment = harness(command=None, world=None, tasks={"train": ["t_1", "t_2"]}, accept_reward=True)
    async with (
        local_node(policy, tmp_path / "node", environment=environment) as running,
        aiohttp.ClientSession() as http,
    ):
        await running.call(running.client.start_collection, request(tasks=["t_1", "t_2"], rollouts_per_task=1))
        node_token = {"Authorization": f"Bearer {TOKEN}"}
        for task, reward in (("t_2", 1.0), ("t_1", None)):
            asked = {"task_id": task, "wait_s": 60}
            async with http.post(f"{running.url}/v1/episodes", json=asked, headers=node_token) as answer:
                episode = await answer.json()
            assert episode["task_id"] == task
            key = {"Authorization": f"Bearer {episode['api_key']}"}
            async with http.get(f"{episode['base_url']}/episode", headers=key) as answer:
                assert await answer.json() == {"task_id": task, "messages": []}
            async with openai.AsyncOpenAI(base_url=episode["base_url"], api_key=episode["api_key"]) as client:
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": task}])
            async with http.post(f"{episode['base_url']}/episode/step", json={"action": "x"}, headers=key) as answer:
                assert answer.status == 404
            wrong = [{"reward": 7}, {"metrics": {"steps": "many"}}, {"rewards": [1.0]}, {"metrics": {"x" * 65: 1}}]
            for body, status in (*((body, 400) for body in wrong), ({"reward": reward}, 200)):
                async with http.post(f"{episode['base_url']}/episode/finish", json=body, headers=key) as answer:
                    assert answer.status == status
        async with http.post(f"{running.url}/v1/episodes", json={}, headers=node_token) as answer:
            assert answer.status == 204
        rollouts, end = await running.collect(request(tasks=["t_1", "t_2"], rollouts_per_task=1))
    assert end.reason == "complete"
    assert {rollout.task_id: (rollout.reward, rollout.ungradable) for rollout in rollouts} == {
        "t_1": (0.0, "the harness ended without a reward"),
        "t_2": (1.0, None),
    }


async def test_a_worker_elsewhere_plays_episodes_and_says_what_they_were_worth(policy, tmp_path):
    environment = harness(command=None, world=None, tasks={"dev": ["t_1", "t_2"]}, accept_reward=True)
    seen = []

    def play(episode):
        seen.append(episode)
        client = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key)
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": episode.task_id}])
        if episode.task_id == "t_2":
            raise RuntimeError("a defect of the agent")
        return {"reward": 0.5, "rewards": {"form": 1.0, "answer": 0.0}, "metrics": {"steps": 3}}

    async with local_node(policy, tmp_path / "node", environment=environment) as running:
        asked = request(tasks=["t_1", "t_2"], rollouts_per_task=1)
        await running.call(running.client.start_collection, asked)
        played = await running.call(play_episodes, running.url, play, TOKEN, lambda: len(seen) == 2)
        rollouts, end = await running.collect(asked)
    assert (played, end.reason) == (2, "complete")
    rollouts = {rollout.task_id: rollout for rollout in rollouts}
    for episode in seen:
        assert (episode.split, episode.collection, episode.policy_version) == ("dev", asked.id, 0)
        assert episode.episode_id == rollouts[episode.task_id].episode_id
    noted = rollouts["t_1"].extra["stated"]
    assert (rollouts["t_1"].reward, noted["rewards"]["form"], noted["metrics"]) == (0.5, 1.0, {"steps": 3.0})
    assert (rollouts["t_2"].reward, rollouts["t_2"].ungradable) == (0.0, "the harness ended without a reward")


async def test_an_episode_is_offered_again_if_whoever_took_it_goes_before_the_answer_is_sent(
    policy, tmp_path, monkeypatch
):
    environment = harness(command=None, world=None, tasks={"train": ["t_1"]}, accept_reward=True)
    token = {"Authorization": f"Bearer {TOKEN}"}

    async def gone(*_):
        raise ConnectionResetError

    async with (
        local_node(policy, tmp_path / "node", environment=environment) as running,
        aiohttp.ClientSession() as http,
    ):
        await running.call(running.client.start_collection, request(tasks=["t_1"], rollouts_per_task=1))
        asked = {"task_id": "t_1", "wait_s": 60}
        with monkeypatch.context() as patches:
            patches.setattr("aiohttp.web.Response.prepare", gone)
            with pytest.raises(aiohttp.ClientError):
                await http.post(f"{running.url}/v1/episodes", json=asked, headers=token)
        async with http.post(f"{running.url}/v1/episodes", json=asked, headers=token) as answer:
            assert (await answer.json())["task_id"] == "t_1"
        await running.call(running.client.cancel, "c1")


async def test_what_is_no_question_for_an_episode_is_refused(policy, tmp_path):
    environment = harness(command=None, world=None, tasks={"train": ["t_1"]}, accept_reward=True)
    token = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        local_node(policy, tmp_path / "node", environment=environment) as running,
        aiohttp.ClientSession(headers=token) as http,
    ):
        for body in ({"task": "t_1"}, {"wait_s": 1e9}, {"task_id": 3}, []):
            async with http.post(f"{running.url}/v1/episodes", json=body) as answer:
                assert answer.status == 400


async def test_policy_versions_are_pinned_or_the_latest_at_each_call(policy, tmp_path):
    environment = harness(command=[sys.executable, "-c", SUB_AGENTS])
    async with local_node(policy, tmp_path / "node", environment=environment) as running:
        await running.call(running.client.publish_policy, 1, policy / "adapter1")
        seen = {}
        for mode in ("pinned", "latest"):
            asked = dataclasses.replace(
                request(tasks=["reach3_1"], rollouts_per_task=1, policy_mode=mode), id=f"c-{mode}"
            )
            rollouts, _ = await running.collect(asked)
            seen[mode] = {version for rollout in rollouts for version in rollout.policy_versions}
    assert seen == {"pinned": {0}, "latest": {1}}
