"""Episodes of tool environments, stateless ones here; instances have their own file."""

import pytest

from agent_environments.conformance import HOSTILE_ACTIONS, check_conformance
from agent_environments.observation import TRUNCATION_NOTE
from agent_environments.protocol import EnvironmentCrashed, EnvironmentPool, UnknownTask, create_pool
from agent_environments.tool_calls import tools_section
from agent_environments.tools.environment import ToolPool
from support.adapter_support import word_spans
from support.episodes import open_pool
from support.texts import texts_beside
from support.tool_modules import COUNTER, SUMS, call, write

HOSTILE_CALLS = (
    *HOSTILE_ACTIONS,
    "<tool_call>",
    "<tool_call>{",
    '<tool_call>{"name": "add", "arguments": ' + "[" * 100_000,
    '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>",
    call("\ud800"),
    call("x" * 1_000_000),
    call("add", a="\ud800"),
    call("add", a=1e308),
    call("add", self=1),
    call("repeat", text="\ud800", times=2),
    call("repeat", text="x", times=10**8),
    *(call("fail", how=how) for how in ("exit", "bytes", "surrogate", "raise")),
    call("dawdle", seconds=0.3),
    call("hang"),
    call("power"),
    call("leave"),
    call("answer", value=10**4000),
    "\n".join([call("add", a=1)] * 500),
)


def pool_of(tmp_path, source=SUMS, **options):
    return ToolPool(word_spans, write(tmp_path, source), **options)


async def play(pool, task, *actions):
    """The opening messages, the results of the actions, and the grade."""
    environment = await pool.acquire("test")
    try:
        opening = await environment.start(task)
        results = [await environment.step(action) for action in actions]
        return opening, results, await environment.grade()
    finally:
        await environment.close()


@pytest.fixture
async def sums(tmp_path):
    async with open_pool(pool_of(tmp_path)) as pool:
        yield pool


@pytest.mark.attack
@pytest.mark.fault("functions of one's own file see every key of the node's environment")
async def test_functions_see_the_variables_that_the_config_names_and_those_that_all_programs_need(
    tmp_path, monkeypatch, caplog
):
    kept = {"HOME": str(tmp_path), "LANG": "C.UTF-8", "http_proxy": "http://proxy:3128", "PYTHONPATH": ""}
    secret = {"WANDB_API_KEY": "x", "OPENAI_API_KEY": "x", "MY_KEY": "x", "NVIDIA_API_KEY": "x", "LC_API_KEY": "x"}
    secret |= {"https_proxy": "http://user:pass@proxy"}
    for name, value in {**kept, **secret}.items():
        monkeypatch.setenv(name, value)
    source = TEXTS["reads_a_key"].replace("{how}", '.get("MY_KEY")')
    for given, shown in (({}, "None"), ({"MY_KEY": "mine"}, "mine")):
        async with open_pool(pool_of(tmp_path, source, variables=given)) as pool:
            _, [seen], _ = await play(pool, "t", call("look"))
        [key, *names] = seen.observation.splitlines()[1].split()
        assert (key, secret.keys() & set(names)) == (shown, given.keys())
        assert kept.keys() | {"PATH", "TMPDIR"} <= set(names)
    lines = [record.message for record in caplog.records if "MY_KEY" in record.message]
    assert len(lines) == 1
    assert "set node.environment.variables.MY_KEY='${oc.env:MY_KEY}'" in lines[0]
    pool = pool_of(tmp_path, TEXTS["reads_a_key"].replace("{how}", '["MY_KEY"]'))
    with pytest.raises(EnvironmentCrashed, match=r"KeyError.*variables\.MY_KEY="):
        await pool.open()
    await pool.close()


async def test_an_episode(sums):
    opening, results, grade = await play(sums, "sum_1", call("add", a=17, b=25), call("answer", value=42))
    system, user = opening
    schemas = [tool.schema for tool in sums.module.tools.values()]
    assert (system.role, system.content) == ("system", "You add numbers.\n\n" + tools_section(schemas))
    assert (user.role, user.content) == ("user", "What is 17 + 25?")
    assert results[0].observation == "<tool_response>\n42\n</tool_response>"
    assert [result.done for result in results] == [False, True]
    assert not any(result.failed for result in results)
    assert (grade.reward, grade.success) == (1.0, True)


async def test_several_calls_run_in_order_and_share_an_observation(sums):
    turn = f"First this {call('add', a=1)} then {call('answer', value=42)} and never {call('fail', how='x')}"
    _, (result,), grade = await play(sums, "sum_1", turn)
    assert result.observation == "<tool_response>\n2\n</tool_response>\n<tool_response>\n42\n</tool_response>"
    assert result.done
    assert grade.success


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        (
            "<tool_call>{add}</tool_call>",
            "Error: this is no tool call: not valid JSON: Expecting property name enclosed",
        ),
        (call("subtract", a=1), "Error: there is no tool 'subtract'; there are add, repeat, fail, dawdle, answer"),
        (call("add", a="x"), "Error: wrong arguments for add: a: Input should be a valid integer"),
        (call("fail", how="x"), "Error: the tool failed: KeyError: 'x'"),
        (call("fail", how="exit"), "Error: the tool failed: SystemExit: 3"),
        (call("fail", how="bytes"), "Error: the tool failed: its result cannot be shown"),
        (call("dawdle", seconds=0.5), "Error: the tool failed: took longer than 0.05 s"),
        (call("answer", value="x"), "Error: wrong arguments for answer: value: "),
    ],
)
async def test_mistakes_are_told_and_the_episode_goes_on(sums, turn, answer):
    _, (wrong, right), grade = await play(sums, "sum_1", turn, call("answer", value=42))
    assert wrong.observation.startswith(f"<tool_response>\n{answer}")
    assert (wrong.failed, wrong.done, right.done, grade.success) == (True, False, True, True)


async def test_long_results_are_cut(sums):
    _, (result,), _ = await play(sums, "sum_1", call("repeat", text="ab", times=50))
    assert result.observation.startswith("<tool_response>\nabababababababababab\n... (the result is too long")


async def test_the_results_of_a_turn_are_cut_together(tmp_path):
    """Each may have 2,048 characters; a turn of many calls would fill the context many times over."""
    async with open_pool(pool_of(tmp_path, observation_max_tokens=300)) as pool:
        _, (result,), _ = await play(pool, "sum_1", call("add", a=1) * 500)
    assert len(word_spans(result.observation.removesuffix(TRUNCATION_NOTE))) <= 300
    assert result.observation.startswith("<tool_response>\n2\n</tool_response>\n<tool_response>\n2\n")
    assert result.observation.endswith(TRUNCATION_NOTE)


async def test_a_result_that_is_cut_within_the_turn_is_closed(tmp_path):
    async with open_pool(
        pool_of(tmp_path, SUMS.replace("max_characters=20", "max_characters=2000"), observation_max_tokens=50)
    ) as pool:
        _, (result,), _ = await play(pool, "sum_1", call("add", a=1) + call("repeat", text="word ", times=200))
        assert result.observation == (
            f"<tool_response>\n2\n</tool_response>\n<tool_response>{TRUNCATION_NOTE}\n</tool_response>"
        )


async def test_where_a_tool_ends_the_episode_a_turn_without_a_call_does_not(sums):
    _, (result,), grade = await play(sums, "sum_1", "It is 42.")
    assert (result.done, result.empty_action) == (False, True)
    assert "no tool call" in result.observation
    assert grade.reward == 0.0


async def test_where_no_tool_ends_the_episode_text_is_the_answer(tmp_path):
    async with open_pool(pool_of(tmp_path, SUMS.replace("@tool(terminal=True)", "@tool"))) as pool:
        _, results, grade = await play(pool, "sum_1", call("answer", value=41), " 42\n")
        assert [result.done for result in results] == [False, True]
        assert grade.success


async def test_the_reward_sees_the_whole_conversation(sums):
    turns = [call("add", a=1)] * 3 + [call("answer", value=42)]
    _, _, grade = await play(sums, "sum_1", *turns)
    assert (grade.reward, grade.success) == (0.5, False)


TEXTS = texts_beside(__file__)
SEVERAL = TEXTS["several"]


async def test_several_rewards_make_the_grade_each_with_its_own_figure(tmp_path):
    async with open_pool(pool_of(tmp_path, SUMS.replace("@reward", SEVERAL, 1))) as pool:
        _, _, grade = await play(pool, "sum_1", call("answer", value=41))
        assert (grade.reward, grade.success, grade.broke) == (0.45, False, None)
        assert (grade.rewards, grade.metrics) == ({"near": 9.0, "right": 0.0}, {"calls": 1.0, "broken": 0.5})
        _, _, grade = await play(pool, "sum_1", "I do not know.")  # no answer; 42 is 42 off, and below the scale
        assert (grade.reward, grade.broke.where) == (0.0, "reward near")
        assert "reward near returned -32, which is not a number from 0 to 10" in grade.ungradable
        _, _, grade = await play(pool, "sum_1", call("answer", value=36))
        assert grade.reward == 0.2


async def test_a_metric_that_raises_is_told_and_the_reward_stays(tmp_path):
    async with open_pool(
        pool_of(tmp_path, SUMS.replace("@reward", "@reward(weight=0)\ndef lost(): 1 / 0\n\n\n@reward", 1))
    ) as pool:
        _, _, grade = await play(pool, "sum_1", call("answer", value=42))
        assert (grade.reward, grade.success, grade.ungradable) == (1.0, True, None)
        assert (grade.broke.where, grade.rewards, grade.metrics) == ("reward lost", {"right": 1.0}, {})


def test_tasks_and_splits(tmp_path):
    pool = create_pool("tools", {"module": write(tmp_path, SUMS)}, word_spans)
    assert isinstance(pool, EnvironmentPool)
    assert pool.dataset == "mine"
    assert (pool.tasks("train"), pool.tasks("dev")) == (["sum_1"], ["dev1"])
    with pytest.raises(UnknownTask, match="no split 'test'; there are train, dev"):
        pool.tasks("test")


async def test_a_stateless_environment_conforms(sums):
    await check_conformance(sums, "sum_1", HOSTILE_CALLS)


async def test_a_stateful_environment_conforms(tmp_path):
    async with open_pool(pool_of(tmp_path, COUNTER, max_worlds=2)) as pool:
        await check_conformance(pool, "count3_1", HOSTILE_CALLS)
