"""A pool on a service that speaks AgentGym's HTTP protocol.

The protocol is that of AgentGym's own servers: ``/create``, ``/reset``, ``/step``; an error is an answer with status
200 and the key ``error``. Most servers list no tasks and have no ``/close`` and no grade; ours
(:mod:`loop_contrib.services.server`) have all three.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_environments.lost_worlds import Loss, WorldLost
from agent_environments.protocol import TokenSpans
from agent_environments.remote.line import WorldLine
from loop_contrib.services.service_pool import NoSuchPath, ServiceLine, ServicePool, failure, is_ours

SCENARIO = "item"


class AgentGymPool(ServicePool):
    """Lends episodes of an AgentGym service. A task has the id that the service gives it, or else ``item_<data_idx>``.

    Args:
        options: as for :class:`ServicePool`; ``splits`` give ranges of ``data_idx``.
    """

    def __init__(
        self,
        token_spans: TokenSpans,
        url: str,
        dataset: str,
        observation_field: str = "observation",
        **options: Any,
    ) -> None:
        super().__init__(token_spans, url, dataset, observation_field=observation_field, **options)
        if self.action_field is None:
            raise ValueError("an action of AgentGym is a text: action_field is the name of its field")
        self.indices: dict[str, int] = {}
        """Task id -> ``data_idx``."""
        self.names_tasks = True
        """True once the service has served ``/tasks``; such a service has grades."""

    async def _tasks(self) -> Mapping[str, list[str]]:
        try:
            named: Mapping[str, list[str]] = (await self.request("GET", "/tasks"))["tasks"]
        except NoSuchPath:
            self.names_tasks = False
            if self._ranges is None:
                raise ValueError("set splits to ranges of its data_idx") from None
            ids = {index: f"{SCENARIO}_{index}" for limits in self._ranges.values() for index in range(*limits)}
        else:
            ids = dict(enumerate(task for tasks in named.values() for task in tasks))
        self.indices = {task: index for index, task in ids.items()}
        if self._ranges is None:
            return named
        missing = [split for split, (first, end) in self._ranges.items() if not ids.keys() >= set(range(first, end))]
        if missing:
            raise ValueError(f"splits.{missing[0]} goes beyond its {len(ids)} tasks")
        return {split: [ids[index] for index in range(first, end)] for split, (first, end) in self._ranges.items()}

    async def _connect(self) -> WorldLine:
        answer = await self.request("POST", "/create", json={})
        number = answer.get("id") if isinstance(answer, dict) else answer  # some servers answer with the bare number
        if not isinstance(number, int):
            raise WorldLost(f"/create gives no session: {str(answer)[:200]}", Loss.REFUSED)
        return AgentGymLine(self, number)


class AgentGymLine(ServiceLine):
    """The line to one session of an AgentGym service."""

    _pool: AgentGymPool

    def __init__(self, pool: AgentGymPool, number: int) -> None:
        super().__init__(pool)
        self._number = number

    async def _round_trip(self, request: Mapping[str, Any]) -> dict[str, Any]:
        match request["op"]:
            case "start":
                answer = await self._post("/reset", {"data_idx": self._pool.indices[request["task"]]})
                return {**self._answered(answer), "messages": answer.get("messages", []) if is_ours(answer) else []}
            case "step":
                return self._answered(await self._post("/step", {str(self._pool.action_field): request["command"]}))
            case "grade":
                return await self._grade()
        await self._post("/close", {})
        return {}

    async def _grade(self) -> dict[str, Any]:
        try:
            return self._checked(await self._pool.request("GET", "/grade", params={"id": str(self._number)}))
        except NoSuchPath:
            if self._pool.names_tasks:  # it has grades: a proxy answered, or a service that still starts
                raise
            return self._pool.grade_of(self._earned, self._done)

    async def _post(self, path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return self._checked(await self._pool.request("POST", path, json={"id": self._number, **fields}))

    @staticmethod
    def _checked(answer: Any) -> dict[str, Any]:
        match answer:
            case {"error": error, **more}:
                raise failure(str(error), more.get("reason"))
            case dict():
                return answer
        raise WorldLost(f"the service's answer is not an object: {str(answer)[:200]}", Loss.CUT)

    def _answered(self, answer: dict[str, Any]) -> dict[str, Any]:
        return self._observed(answer, answer.get("done", False), answer.get("reward"))
