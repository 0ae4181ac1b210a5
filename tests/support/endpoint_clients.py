"""Agents of other people's libraries, run by an interpreter that has them: ``endpoint_clients.py LIBRARY HOW``.

Each has one tool, is asked for one thing and goes on until the policy calls no tool. HOW is ``whole`` or ``stream``.
Nothing here knows of the endpoint: they read ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, or the same for Anthropic.
A library stands here as it comes; where its chat API is another class, that is one more client.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterable

ORDERS = "You move a counter."
QUESTION = "Bring the counter from 0 to 9."


def add(n: int) -> str:
    """Add a number to the counter.

    Args:
        n: what is added.
    """
    return f"added {n}"


def litellm_loop(stream: bool) -> None:
    import litellm

    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tools = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": schema}}]
    messages = [{"role": "system", "content": ORDERS}, {"role": "user", "content": QUESTION}]
    while True:
        answer = litellm.completion(model="openai/policy", messages=messages, tools=tools, stream=stream)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            return
        for call in said.tool_calls:
            result = add(json.loads(call.function.arguments)["n"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def openai_agents_chat(stream: bool) -> None:
    import agents
    import openai

    openai_agents(stream, agents.OpenAIChatCompletionsModel(model="policy", openai_client=openai.AsyncOpenAI()))


def openai_agents(stream: bool, model: object = "policy") -> None:
    import agents

    agents.set_tracing_disabled(True)
    agent = agents.Agent(name="counter", instructions=ORDERS, tools=[agents.function_tool(add)], model=model)

    async def play() -> None:
        if not stream:
            await agents.Runner.run(agent, QUESTION)
            return
        async for _ in agents.Runner.run_streamed(agent, QUESTION).stream_events():
            pass

    asyncio.run(play())


def pydantic_ai_chat(stream: bool) -> None:
    pydantic_ai(stream, "openai-chat:policy")


def pydantic_ai_anthropic(stream: bool) -> None:
    pydantic_ai(stream, "anthropic:policy")


def pydantic_ai(stream: bool, model: str = "openai:policy") -> None:
    from pydantic_ai import Agent

    agent = Agent(model, instructions=ORDERS, tools=[add])

    async def drain(_: object, events: AsyncIterable[object]) -> None:
        async for _ in events:
            pass

    # Not its run_stream, which ends at the first text, before the calls that follow it.
    agent.run_sync(QUESTION, event_stream_handler=drain if stream else None)


def anthropic_tool_runner(stream: bool) -> None:
    import anthropic

    runner = anthropic.Anthropic().beta.messages.tool_runner(
        model="policy",
        max_tokens=200,
        system=ORDERS,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[anthropic.beta_tool(add)],
        stream=stream,
    )
    for answer in runner:
        if stream:
            for _ in answer:
                pass


def inspect_ai(stream: bool) -> None:
    import inspect_ai as inspect
    from inspect_ai.dataset import Sample
    from inspect_ai.solver import generate, system_message, use_tools
    from inspect_ai.tool import tool

    @tool(name="add")
    def adder():
        async def execute(n: int) -> str:
            """Add a number to the counter.

            Args:
                n: what is added.
            """
            return add(n)

        return execute

    task = inspect.Task([Sample(QUESTION)], solver=[system_message(ORDERS), use_tools(adder()), generate()])
    [log] = inspect.eval(task, model="openai/policy", display="none", log_dir=".", model_args={"streaming": stream})
    if log.status != "success":
        sys.exit(str(log.error))


def langchain(stream: bool, model: str = "openai:policy") -> None:
    from langchain.agents import create_agent

    agent = create_agent(model, tools=[add], system_prompt=ORDERS)
    asked = {"messages": [{"role": "user", "content": QUESTION}]}
    if not stream:
        agent.invoke(asked)
        return
    for _ in agent.stream(asked, stream_mode="messages"):
        pass


def langchain_anthropic(stream: bool) -> None:
    langchain(stream, "anthropic:policy")


CLIENTS = {
    "litellm": litellm_loop,
    "openai_agents": openai_agents,
    "openai_agents_chat": openai_agents_chat,
    "pydantic_ai": pydantic_ai,
    "pydantic_ai_chat": pydantic_ai_chat,
    "pydantic_ai_anthropic": pydantic_ai_anthropic,
    "anthropic": anthropic_tool_runner,
    "inspect_ai": inspect_ai,
    "langchain": langchain,
    "langchain_anthropic": langchain_anthropic,
}

if __name__ == "__main__":
    library, how = sys.argv[1:]
    CLIENTS[library](how == "stream")
