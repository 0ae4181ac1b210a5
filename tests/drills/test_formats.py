"""Drill: ten files of each format of conversations, from the writer of its own package where it has one: each becomes
ids, or one line that names file, line and field.

    make drills K=formats
"""

import subprocess
import sys
from pathlib import Path

import pytest

from loop_formats.schema import ConfigError
from loop_recipes.rollouts.chats import read_chat_set
from model_families.chat import open_chat
from support import random_policy
from support.chat_templates import FORMS

pytestmark = [pytest.mark.integration, pytest.mark.drill, pytest.mark.timeout(1800)]

PACKAGES = ("atif==1.8.0", "verifiers==0.4.0", "pyarrow==26.0.1", "openai==2.54.0")

WRITE = r"""
import json, sys
from pathlib import Path
packages, folder = sys.argv[1:]
sys.path.insert(0, packages)
folder = Path(folder)

def write(name, text):
    (folder / f"{name}.jsonl").write_text(text.rstrip("\n") + "\n")

# ATIF
from atif import Agent, ContentPart, ImageSource, Metrics, Observation, ObservationResult, Step, ToolCall, Trajectory

def atif(name, *steps, **agent):
    steps = [Step(step_id=n, **step) for n, step in enumerate(steps, 1)]
    agent = Agent(name="a", version="1", **agent)
    whole = Trajectory(schema_version="ATIF-v1.8", session_id="s", agent=agent, steps=steps)
    write(f"atif_{name}", whole.model_dump_json(exclude_none=name != "nulls"))

user, system = {"source": "user", "message": "Add."}, {"source": "system", "message": "Be brief."}
done = {"source": "agent", "message": "Done."}
calls = [ToolCall(tool_call_id="c", function_name="add", arguments={"n": 1})]
call = {"source": "agent", "message": "", "tool_calls": calls}
seen = Observation(results=[ObservationResult(source_call_id="c", content="2")])
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
picture = ContentPart(type="image", source=ImageSource(media_type="image/png", path="a.png"))
first = Metrics(prompt_token_ids=[1, 5], completion_token_ids=[7, 2], logprobs=[-0.5, -0.25])
atif("plain", user, done)
atif("nulls", user, done)
atif("two_systems", system, system, user, done)
atif("calls", user, {**call, "observation": seen}, done, tool_definitions=[TOOL])
atif("call_without_result", user, call)
atif("empty_content", user, {"source": "agent", "message": ""})
atif("thinking", user, {**done, "reasoning_content": "I add."})
atif("ids", user, {**done, "metrics": first})
atif("picture", {"source": "user", "message": [picture]}, done)
atif("no_agent", user)

# verifiers
from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.episode import Episode
from verifiers.v1.graph import MessageNode
from verifiers.v1.task import WireTaskData
from verifiers.v1.trace import AgentInfo, Reward, Trace, TraceTask
from verifiers.v1.types import AssistantMessage, SystemMessage, Tool, ToolMessage, UserMessage
from verifiers.v1.types import ToolCall as Call
from verifiers.v1.utils.trace_store import TRACES_FILE, write_episode

def trace(name, *messages, reward=1.0, ids=(), tools=()):
    task = TraceTask[WireTaskData](type="t", data=WireTaskData(idx=0, prompt="Add."))
    nodes = []
    for number, message in enumerate(messages):
        sampled = message.role == "assistant"
        own = {"token_ids": ids[number], "mask": [sampled and n > 0 for n in range(len(ids[number]))]} if ids else {}
        own |= {"logprobs": [-0.5] * sum(own["mask"])} if ids and sampled else {}
        tools_of = list(tools) if number == 0 else []
        own |= {"parent": number - 1 if number else None, "tools": tools_of}
        nodes.append(MessageNode(message=message, sampled=sampled, **own))
    ended = {"rewards": {"r": None if reward is None else Reward(score=reward)}, "is_completed": reward is not None}
    done = Trace(task=task, agent=AgentInfo(config=WireAgentConfig()), nodes=nodes, **ended)
    write_episode(folder, Episode(task=task, traces=[done], ok=True))
    (folder / TRACES_FILE).rename(folder / f"trace_{name}.jsonl")

asks, says = UserMessage(content="Add."), AssistantMessage(content="Done.")
calls = AssistantMessage(tool_calls=[Call(id="c", name="add", arguments='{"n": 1}')])
trace("plain", asks, says)
trace("two_systems", SystemMessage(content="x"), SystemMessage(content="y"), asks, says)
adds = [Tool(name="add", description="Adds.")]
trace("calls", asks, calls, ToolMessage(tool_call_id="c", content="2"), says, tools=adds)
trace("call_without_result", asks, calls)
trace("empty_content", asks, AssistantMessage(content=""))
trace("no_content", asks, AssistantMessage(content=None))
trace("thinking", asks, AssistantMessage(content="Done.", reasoning_content="I add."))
trace("ids", asks, says, ids=([1, 5], [3, 7, 2]))
custom = Call(id="c", type="custom", name="add", arguments="1 + 1")
trace("call_that_is_no_json", asks, AssistantMessage(tool_calls=[custom]))
trace("not_complete", asks, says, reward=None)

# OpenAI's messages: the client's own answers, and rows of a table, as TRL's data is
import pyarrow
from pyarrow.parquet import write_table
from openai.types.chat import ChatCompletionMessage

def openai(name, *messages, table="", **more):
    messages = [each if isinstance(each, dict) else each.model_dump(exclude_none=not table) for each in messages]
    # With a second row that has fields of its own, which are null in the first.
    rows = [{"messages": messages, **more}, {"messages": [{**ask, "weight": 1}, {**done_, "name": "x"}], "extra": "y"}]
    if table == "parquet":
        write_table(pyarrow.Table.from_pylist(rows), folder / f"openai_{name}.parquet")
    elif table == "json":
        write(f"openai_{name}", "\n".join(map(json.dumps, pyarrow.Table.from_pylist(rows).to_pylist())))
    else:
        write(f"openai_{name}", json.dumps({"messages": messages, **more}))

def answer(content, **more):
    return ChatCompletionMessage.model_validate({"role": "assistant", "content": content, **more})

ask, rule = {"role": "user", "content": "Add."}, {"role": "system", "content": "Be brief."}
done_ = {"role": "assistant", "content": "Done."}
function = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"n": 1}'}}
result = {"role": "tool", "tool_call_id": "c", "content": "2"}
openai("plain", ask, answer("Done."))
openai("two_systems", rule, {**rule, "role": "developer"}, ask, answer("Done."))
openai("calls", ask, answer(None, tool_calls=[function]), result, answer("Done."), tools=[TOOL])
openai("call_without_result", ask, answer(None, tool_calls=[function]))
openai("empty_content", ask, answer(""))
openai("thinking", ask, answer("Done.", reasoning_content="I add."))
openai("refusal", ask, answer(None, refusal="I will not."))
openai("table_as_json", rule, ask, answer("Done."), table="json")
openai("table_as_parquet", ask, answer(None, tool_calls=[function]), result, answer("Done."), table="parquet")
custom = {"id": "c", "type": "custom", "custom": {"name": "add", "input": "1"}}
openai("custom_call", ask, answer(None, tool_calls=[custom]))

# ShareGPT has no package
def sharegpt(name, *turns, **more):
    said = [{"from": who, "value": text} for who, text in turns]
    write(f"sharegpt_{name}", json.dumps({"conversations": said, **more}))

human, gpt = ("human", "Add."), ("gpt", "Done.")
sharegpt("plain", human, gpt)
sharegpt("two_systems", ("system", "x"), ("system", "y"), human, gpt)
sharegpt("system_beside", human, gpt, system="x")
acts = ("function_call", '{"name": "add", "arguments": {"n": 1}}')
sharegpt("calls", human, acts, ("observation", "2"), gpt, tools=json.dumps([TOOL]))
sharegpt("call_without_result", human, acts)
sharegpt("empty_content", human, ("gpt", ""))
sharegpt("thinking", human, ("gpt", "<think>\nI add.\n</think>\n\nDone."))
sharegpt("begins_with_gpt", gpt, human, gpt)
sharegpt("unknown_role", ("narrator", "x"), gpt)
sharegpt("no_gpt", human)
"""

REFUSED = {
    "atif_picture": r"steps\[0\]\.message\[0\] is image: only text can be learned from",
    "atif_no_agent": "there is no assistant message to learn from",
    "trace_call_that_is_no_json": r"message\.tool_calls\[0\]\.arguments is no JSON",
    "trace_not_complete": r"rewards\.r is null in a trace that is not complete",
    "openai_custom_call": r"messages\[1\]\.tool_calls\[0\] names no function",
    "sharegpt_unknown_role": r"conversations\[0\]\.from is 'narrator'",
    "sharegpt_no_gpt": "there is no assistant message to learn from",
}
REFUSED_BY_TEMPLATES = {
    "sharegpt_begins_with_gpt": "the chat template has no form for a conversation that begins with an answer",
}
"""By the template that the thinking model has, beside those that nothing can read."""
TURNS = {"calls": 2, "table_as_parquet": 2, "begins_with_gpt": 2}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    packages, folder = (tmp_path_factory.mktemp(name) for name in ("packages", "files"))
    install = [Path(sys.executable).with_name("uv"), "pip", "install", "--quiet", "--python", sys.executable]
    subprocess.run([*install, "--target", packages, *PACKAGES], check=True, timeout=900)
    script = tmp_path_factory.mktemp("script") / "write.py"
    script.write_text(WRITE)
    command = [sys.executable, "-I", "-S", script, packages, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return {file.stem: file for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("thinks", [False, True], ids=["chatml", "thinking"])
@pytest.mark.parametrize("form", ["atif", "trace", "openai", "sharegpt"])
def test_each_file_becomes_ids_or_one_line(tmp_path, written, form, thinks):
    if thinks:
        FORMS["SmolLM3"].write(tmp_path)
    else:
        random_policy.write_tokenizer(tmp_path)
    chat = open_chat(tmp_path)
    files = {name: file for name, file in written.items() if name.startswith(f"{form}_")}
    assert len(files) == 10
    for name, file in files.items():
        if (said := REFUSED.get(name) or (REFUSED_BY_TEMPLATES.get(name) if thinks else None)) is not None:
            with pytest.raises(ConfigError, match=said) as refused:
                read_chat_set([str(file)], chat, "all", 0.0)
            assert str(refused.value).startswith(f"data: {file}:1")
            assert "\n" not in str(refused.value)
            print(f"{name}: {refused.value}")
            continue
        rollout, *_ = read_chat_set([str(file)], chat, "all", 0.0).rollouts
        assert len(rollout.turns) == TURNS.get(name.removeprefix(f"{form}_"), 1), name
        assert rollout.token_ids[-1] in (2, *chat.stop_ids), name
        turn = rollout.turns[-1]
        if name.endswith("thinking"):
            read = chat.read(rollout.token_ids[: turn.start], rollout.token_ids[turn.start : turn.end], False)
            assert read.reasoning == ("I add." if thinks else ""), name
        print(f"{name}: {len(rollout.token_ids)} ids, {rollout.sampled_tokens} learned")
