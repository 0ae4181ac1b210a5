"""An agent in forty lines: OpenAI's client, and a world that the rollout node opens (docs/your_own_task.md)."""

import os

import httpx
import openai


def play() -> None:
    """Play an episode; the node sets the variables OPENAI_BASE_URL and OPENAI_API_KEY."""
    client = openai.OpenAI(timeout=600.0)
    world = httpx.Client(
        base_url=os.environ["OPENAI_BASE_URL"],
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
        timeout=600.0,
    )
    messages = world.get("/episode").raise_for_status().json()["messages"]
    while True:
        try:
            answer = client.chat.completions.create(model="policy", messages=messages)
        except openai.APIStatusError as error:
            if error.code in ("episode_over", "context_length_exceeded"):
                return  # a limit of turns, time or context: the node grades the state so far
            raise
        text = answer.choices[0].message.content
        messages.append({"role": "assistant", "content": text})
        result = world.post("/episode/step", json={"action": text}).raise_for_status().json()
        if result["done"]:
            return
        messages.append({"role": "user", "content": result["observation"]})


if __name__ == "__main__":
    play()
