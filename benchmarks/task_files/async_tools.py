import asyncio

from agent_environments.tools import reward, tool

PAGES = {f"page{n}": f"The code of page{n} is {n * n + 7}." for n in range(20)}
lock = asyncio.Lock()


@tool
async def fetch(name: str) -> str:
    """Fetch a page."""
    async with lock:
        await asyncio.sleep(0.001)
        return PAGES.get(name, "404")


@tool(terminal=True)
async def answer(code: int) -> int:
    """Say the code."""
    await asyncio.sleep(0)
    return code


@reward
async def right(answer, code):
    await asyncio.sleep(0)
    return bool(answer) and int(answer) == code


TASKS = [{"id": f"page_{n}", "question": f"What is the code of page{n}?", "code": n * n + 7} for n in range(20)]
