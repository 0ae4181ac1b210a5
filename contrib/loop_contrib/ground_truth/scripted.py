"""Episodes that followed a script, such as reference solutions, as rollouts to learn from."""

from __future__ import annotations

from collections.abc import Sequence

from agent_environments.protocol import Message
from loop_formats.ids import rollout_id
from loop_formats.rollout import Rollout, Turn
from model_families.chat.format import ChatFormat


def scripted_rollout(
    tokens: ChatFormat,
    opening: Sequence[Message],
    steps: Sequence[tuple[str, str]],
    *,
    collection: str,
    task_id: str,
    dataset: str,
    speaker: str,
    index: int = 0,
    reward: float = 1.0,
    success: bool = True,
) -> Rollout:
    """A script as the episode that a policy would be served: its actions count as sampled, with log-prob 0.

    Args:
        steps: (action, observation) of each turn; the last observation is not shown to anybody.
        speaker: what the turns name as their server.
    """
    messages = [{"role": message.role, "content": message.content} for message in opening]
    token_ids, spans = tokens.scripted(opening, steps)
    mask, turns = [False] * len(token_ids), []
    for number, (start, end) in enumerate(spans):
        if number:
            messages.append({"role": "user", "content": steps[number - 1][1]})
        messages.append({"role": "assistant", "content": steps[number][0]})
        turns.append(Turn(start, end, 0, "stop", speaker, 0.0, 0.0, message=len(messages) - 1))
        mask[start:end] = [True] * (end - start)
    return Rollout(
        rollout_id=rollout_id(collection, task_id, index, 0),
        collection_id=collection,
        task_id=task_id,
        index=index,
        attempt=0,
        seed=0,
        dataset=dataset,
        token_ids=token_ids,
        mask=mask,
        sampler_logprobs=[0.0] * len(token_ids),
        turns=turns,
        messages=messages,
        reward=reward,
        success=success,
        requirements=[],
        end_reason="completed",
        temperature=0.0,
        started_at=0.0,
        seconds=0.0,
    ).validate()
