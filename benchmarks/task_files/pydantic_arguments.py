from enum import Enum
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from agent_environments.tools import reward, tool


class Item(BaseModel):
    name: str = Field(description="What is bought")
    count: int = Field(1, ge=1, le=10)


class Speed(str, Enum):
    slow = "slow"
    fast = "fast"


@tool(terminal=True)
def order(
    items: Annotated[list[Item], Field(min_length=1, description="All items of the order")],
    speed: Speed = Field(Speed.slow, description="Of the delivery"),
    pay: Literal["card", "cash"] = "card",
) -> list[Item]:
    """Order items."""
    return items


@reward
def right(answer, wanted):
    return answer == wanted


TASKS = [
    {"id": f"order_{n}", "question": f"Order {n} pears.", "wanted": '[{"name":"pear","count":%d}]' % n} for n in range(1, 11)
]
