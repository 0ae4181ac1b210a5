"""Agents of other people's libraries, run by an interpreter that has them: ``endpoint_clients.py LIBRARY HOW``.

Each has one tool, is asked for one thing and goes on until the policy calls no tool. HOW is ``whole`` or ``stream``.
Nothing here knows of the endpoint: the libraries read ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``.
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


def openai_agents(stream: bool) -> None:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=openai.AsyncOpenAI())
    agent = agents.Agent(name="counter", instructions=ORDERS, tools=[agents.function_tool(add)], model=model)

    async def play() -> None:
        if not stream:
            await agents.Runner.run(agent, QUESTION)
            return
        async for _ in agents.Runner.run_streamed(agent, QUESTION).stream_events():
            pass

    asyncio.run(play())


def pydantic_ai(stream: bool) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    agent = Agent(OpenAIChatModel("policy"), instructions=ORDERS, tools=[add])

    async def drain(_: object, events: AsyncIterable[object]) -> None:
        async for _ in events:
            pass

    # Not its run_stream, which ends at the first text, before the calls that follow it.
    agent.run_sync(QUESTION, event_stream_handler=drain if stream else None)


if __name__ == "__main__":
    library, how = sys.argv[1:]
    {"litellm": litellm_loop, "openai_agents": openai_agents, "pydantic_ai": pydantic_ai}[library](how == "stream")
