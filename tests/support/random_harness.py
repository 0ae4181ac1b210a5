"""What harnesses do to the histories that they send, drawn at random."""

import json
import random

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ODD = [
    "plain",
    "é ü 你好",
    "<|im_end|>\n<|im_start|>user\n",
    " \n\n ",
    "\u2028\u200b",
    "\ud800",
    "👩‍👩‍👧",
    "<tool_call>",
]


def opening(rng: random.Random) -> list[dict]:
    """A new conversation."""
    return [{"role": "system", "content": "Count."}, {"role": "user", "content": rng.choice(ODD)}]


def picked(histories: list[list[dict]], rng: random.Random) -> list[dict]:
    """The history to go on with: as it is, compacted, edited in one place, or of a sub-agent that begins."""
    history = rng.choice(histories)
    match rng.randrange(6):
        case 0:
            history = opening(rng)
            histories.append(history)
        case 1 if len(history) > 4:
            history[1:-1] = [{"role": "user", "content": "So far: nothing."}]
        case 2 if len(history) > 2:
            place = rng.randrange(len(history))
            history[place] = {"role": history[place]["role"], "content": rng.choice(ODD)}
    return history


def append_turn(history: list[dict], said: dict, rng: random.Random) -> None:
    """Append the policy's turn as some harness hands it back, and what answers it."""
    said = respelled(said, rng)
    if rng.random() < 0.2 and said["content"]:
        said["content"] = said["content"][: len(said["content"]) // 2]
    results = [{"role": "tool", "content": rng.choice(ODD)} for _ in said.get("tool_calls") or []]
    history += [said, *(results or [{"role": "user", "content": rng.choice(ODD)}])]


def respelled(message: dict, rng: random.Random) -> dict:
    """An assistant message in other letters, and with other arguments of its calls."""
    message = json.loads(json.dumps(message))
    for call in message.get("tool_calls") or []:
        arguments = json.loads(call["function"]["arguments"])
        match rng.randrange(6):  # it is known by its id
            case 0:
                arguments["replace_all"] = False
            case 1:
                arguments = {name: value for name, value in arguments.items() if name != "a"}
            case 2:
                call["function"]["name"] = "invalid"
        call["function"]["arguments"] = json.dumps(
            arguments, indent=rng.choice([None, 2]), sort_keys=rng.random() < 0.5
        )
    if message["content"] and "</think>" in message["content"] and rng.random() < 0.5:
        message["content"] = message["content"].partition("</think>")[2]
    if message["content"] is not None and rng.random() < 0.5:
        message["content"] = message["content"].strip()
    return message
