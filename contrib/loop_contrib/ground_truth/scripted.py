"""Episodes that followed a script, such as reference solutions, as rollouts to learn from."""

from __future__ import annotations

from collections.abc import Sequence

from agent_environments.protocol import Message
from loop_formats.ids import rollout_id
from loop_formats.rollout import Rollout
from model_families.chat.format import ChatFormat


def scripted_rollout(
    tokens: ChatFormat,
    opening: Sequence[Message],
    steps: Sequence[tuple[str, str]],
    *,
    collection: str,
    task_id: str,
    dataset: str,
    server: str,
    index: int = 0,
    reward: float = 1.0,
    success: bool = True,
) -> Rollout:
    """Return a rollout made from a script, as if a policy had played it. Actions count as sampled, with log-prob 0.

    Args:
        steps: (action, observation) of each turn; the last observation is not used.
        server: the server's name that is stored with the turns.
    """
    messages = [{"role": message.role, "content": message.content} for message in opening]
    token_ids, spans = tokens.scripted(opening, steps)
    turns = []
    for number, (start, end) in enumerate(spans):
        if number:
            messages.append({"role": "user", "content": steps[number - 1][1]})
        messages.append({"role": "assistant", "content": steps[number][0]})
        turns.append((len(messages) - 1, start, end))
    return Rollout.written(
        rollout_id(collection, task_id, index, 0),
        collection_id=collection,
        task_id=task_id,
        index=index,
        dataset=dataset,
        server=server,
        token_ids=token_ids,
        spans=turns,
        messages=messages,
        reward=reward,
        success=success,
    ).validate()
