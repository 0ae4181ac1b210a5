"""tau2-bench's telecom domain, solo mode: what its tools, its end and its score do beyond what every world does."""

import json

import pytest

from agent_environments.protocol import create_pool
from agent_environments.tool_calls import ToolCall, parse_tool_calls, render_tool_call
from contrib_support.real_worlds import NEEDS_WORLDS, PYTHON, expert_messages, play
from loop_recipes.paths import loop_package
from model_families.chat import open_chat
from support.adapter_support import word_spans
from support.episodes import open_pool

pytestmark = NEEDS_WORLDS

TRANSFER_TASK = "service-issue_274"
REFUEL_TASK = "mobile-data-issue_34"
DONE = render_tool_call(ToolCall("done", {}))
TRANSFER = render_tool_call(ToolCall("transfer_to_human_agents", {"summary": "Help."}))


@pytest.fixture
async def pool():
    async with open_pool(
        create_pool("tau2", {"python": PYTHON, "domain": "telecom", "max_worlds": 2}, word_spans)
    ) as pool:
        yield pool


async def test_policy_tools_and_ticket_reach_the_agent(pool):
    environment = await pool.acquire("")
    system, user = await environment.start(REFUEL_TASK)
    await environment.close()
    assert "# Telecom Agent Policy" in system.content
    assert system.content.count("</tech_support_policy>") == 1
    lines = system.content.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    names = [json.loads(line)["function"]["name"] for line in lines]
    assert len(set(names)) == 43 + 1  # and "done"
    assert names == pool.tool_names
    assert user.content.startswith("<ticket>\nThe user is experiencing issues")


async def test_the_prompt_survives_rendering_and_tokens(pool):
    """The policy and the schemas of all tools, as the policy under training is given them."""
    environment = await pool.acquire("")
    messages = await environment.start(REFUEL_TASK)
    await environment.close()
    tokens = open_chat(loop_package("tiny_policy"))
    rendered = tokens.decode(tokens.prompt(messages))
    turns = "".join(f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n" for message in messages)
    assert rendered == f"{turns}<|im_start|>assistant\n"
    lines = rendered.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in lines] == list(pool._schemas)


async def test_the_official_solutions_solve_every_task_through_the_tool_call_text(pool):
    for split, tasks in (("train", 74), ("test", 40)):
        solved = 0
        for task in pool.tasks(split):
            commands = await pool.expert(task)
            for command in commands:
                (call,) = parse_tool_calls(pool.message(command))
                assert [{"name": call.name, "arguments": call.arguments}] == json.loads(command)
                assert pool.command(pool.message(command)) == command
            _, grade = await play(pool, task, [pool.message(command) for command in commands])
            solved += grade.success
        assert solved == tasks


async def test_only_done_closes_a_ticket(pool):
    """The official score is of runs that the agent has ended."""
    solution = await expert_messages(pool, REFUEL_TASK)
    assert solution[-1] == DONE
    assert not (await play(pool, REFUEL_TASK, solution[:-1]))[1].success
    assert (await play(pool, REFUEL_TASK, solution))[1].success


async def test_what_stands_before_done_in_a_turn_is_carried_out_and_nothing_after_it(pool):
    shown, grade = await play(pool, TRANSFER_TASK, [f"{TRANSFER}\n{DONE}\n{TRANSFER}"])
    assert grade.success
    assert shown[-1].count("<tool_response>") == 2
    assert not (await play(pool, TRANSFER_TASK, [f"{DONE}\n{TRANSFER}"]))[1].success


async def test_actions_count_where_the_task_says_so(pool):
    """Nothing is to be changed for this ticket, so the end state alone would reward doing nothing."""
    assert not (await play(pool, TRANSFER_TASK, [DONE]))[1].success
    assert (await play(pool, TRANSFER_TASK, [TRANSFER, DONE]))[1].success


async def test_wrong_calls_are_observations(pool):
    wrong = [
        render_tool_call(ToolCall("get_data_usage", {"requestor": "user"})),
        render_tool_call(ToolCall("get_customer_by_id", {"customer_id": "nobody"})),
        render_tool_call(ToolCall("break_apn_settings", {})),  # a function of the phone, but no tool
        "<tool_call>\n{]\n</tool_call>",
    ]
    solution = await expert_messages(pool, REFUEL_TASK)
    shown, grade = await play(pool, REFUEL_TASK, ["\n".join(wrong), *solution])
    assert shown[2].count("<tool_response>\nError: ") == len(wrong)
    assert grade.success


async def test_a_new_bill_has_the_same_number_in_every_play(pool):
    customer = {"customer_id": "C1002"}  # has no draft bill yet
    messages = [
        render_tool_call(ToolCall("refuel_data", {**customer, "line_id": "L1004", "gb_amount": 2.0})),
        render_tool_call(ToolCall("get_bills_for_customer", {**customer, "limit": 12})),
    ]
    first = await play(pool, REFUEL_TASK, messages)
    for worker in list(pool._worlds):
        worker.kill()
    assert await play(pool, REFUEL_TASK, messages) == first
    assert '"status": "Draft"' in first[0][-1]
