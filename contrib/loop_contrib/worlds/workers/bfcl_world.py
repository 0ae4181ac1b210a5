"""The multi-turn tasks of the Berkeley Function Calling Leaderboard, version 4 (the package ``bfcl-eval``).

    python bfcl_world.py MEMORY_MB SOCKET

A user asks for several things, one after the other, of an agent that has the functions of one to four services with a
state of their own: a file system, a car, a broker, a travel agency, tickets, posts, messages, arithmetic. An agent's
turn without a call ends its work on a request, and the next one comes. The score is the official one, 0 or 1 (the
package's ``multi_turn_checker``): after each request the states must equal those after the reference's calls, and the
agent must have got all results of these calls. An agent that makes more than twenty turns for a request has failed, as
in the official run.

Tasks are ``base_<n>``, ``long-context_<n>``, ``miss-func_<n>`` and ``miss-param_<n>``, 200 of each; ``n`` is the
scenario, which all four share. Splits are the four published kinds, and ``train`` and ``test``: the scenarios 0 to 99,
and 100 to 199, of all kinds. Two things differ from the official run. A function that is withheld at first is described
in the user's message that brings it, because the system message cannot change. And the results of functions are not
described.
"""

from __future__ import annotations

import ast
import json
import keyword
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import bfcl_eval
from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC, MAXIMUM_STEP_LIMIT
from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING
from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call
from worker_loop import Step, WorkerEpisode, serve

DATA = Path(bfcl_eval.__file__).parent / "data"
KINDS = ("base", "long_context", "miss_func", "miss_param")
FIRST_TEST_SCENARIO = 100
AGENT = "agent"
ERROR = "Error during execution: "
INSTRUCTIONS = """\
You help a user with the functions below. Call functions until you have done all that the user asks for, as far as you \
can. Then answer without a call; the user may ask for more. If no function does what is asked for, or something is \
missing that it needs, say so without a call."""

Entry = dict[str, Any]


class BfclEpisode(WorkerEpisode):
    """A task being played."""

    def __init__(self, entry: Entry, reference: list[list[str]], documents: dict[str, Any]) -> None:
        self._entry = entry
        self._reference = reference
        withheld = {name for names in entry.get("missed_function", {}).values() for name in names}
        self._known = documents
        self.tools = _tools(each for name, each in documents.items() if name not in withheld)
        self._made: list[list[list[str]]] = [[]]
        self._turns = 0
        self._gave_up = False
        self._ended = False
        self.opening = self._asks(0)

    def _asks(self, number: int) -> str:
        """Return the user's message number ``number``. A message without text lists functions withheld before."""
        messages = self._entry["question"][number]
        if messages:
            return "\n".join(message["content"] for message in messages)
        brought = [self._known[name] for name in self._entry["missed_function"][str(number)]]
        return f"{json.dumps(brought)}\n{DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC}"

    def step(self, command: str) -> Step:
        items = json.loads(command)
        if not items:
            return self._next_request()
        self._turns += 1
        if self._turns > MAXIMUM_STEP_LIMIT:
            self._gave_up = self._ended = True
        calls, answers = [], []
        for item in items:
            call = "" if "mistake" in item else _written(item, self._known)
            if not call:
                answers.append(item if "mistake" in item else {"error": f"name {item['name']!r} is not defined"})
                continue
            calls.append(call)
            (result,) = self._execute([call])
            is_error = result.startswith(ERROR)
            answers.append({"error": result.removeprefix(ERROR)} if is_error else {"result": result})
        self._made[-1].append(calls)
        return Step(json.dumps(answers), self._ended, any("result" not in answer for answer in answers))

    def _next_request(self) -> Step:
        number = len(self._made)
        if number == len(self._entry["question"]):
            self._ended = True
            return Step(json.dumps("The user has no more requests."), True)
        self._made.append([])
        self._turns = 0
        return Step(json.dumps(self._asks(number)), False)

    def _execute(self, calls: list[str]) -> list[str]:
        entry = self._entry
        results, _ = execute_multi_turn_func_call(
            func_call_list=calls,
            initial_config=entry["initial_config"],
            involved_classes=entry["involved_classes"],
            model_name=AGENT,
            test_entry_id=entry["id"],
            long_context="long_context" in entry["id"],
        )
        return list(results)

    def grade(self) -> tuple[float, bool]:
        if self._gave_up or not self._ended:
            return 0.0, False
        kind = self._entry["id"].rsplit("_", 1)[0]
        made = [[calls for calls in turn if calls] for turn in self._made]  # as officially: a turn that called nothing
        solved = bool(multi_turn_checker(made, self._reference, self._entry, kind, AGENT)["valid"])
        return float(solved), solved


def _written(item: dict[str, Any], known: dict[str, Any]) -> str:
    """Return a call as Python code for the package to evaluate; "" for invalid names, which must not be evaluated."""
    arguments = item["arguments"]
    names = all(name.isidentifier() and not keyword.iskeyword(name) for name in arguments)
    if item["name"] not in known or not names:
        return ""
    return f"{item['name']}({','.join(f'{name}={value!r}' for name, value in arguments.items())})"


class BfclWorld:
    instructions = INSTRUCTIONS

    def __init__(self) -> None:
        self._documents = {
            service: {function["name"]: function for function in map(_schema, _lines(f"multi_turn_func_doc/{file}"))}
            for service, file in MULTI_TURN_FUNC_DOC_FILE_MAPPING.items()
        }
        self._entries: dict[str, Entry] = {}
        self._references: dict[str, list[list[str]]] = {}
        for kind in KINDS:
            file = f"BFCL_v4_multi_turn_{kind}.json"
            for entry, solution in zip(_lines(file), _lines(f"possible_answer/{file}"), strict=True):
                assert entry["id"] == solution["id"], "the files are in the same order"
                name = f"{kind.replace('_', '-')}_{entry['id'].rsplit('_', 1)[1]}"
                self._entries[name], self._references[name] = entry, solution["ground_truth"]
        services = sorted({service for entry in self._entries.values() for service in entry["involved_classes"]})
        functions = {name: each for service in services for name, each in self._documents[service].items()}
        self.tools = _tools(functions.values())

    def tasks(self) -> dict[str, list[str]]:
        splits = {kind: [name for name in self._entries if name.startswith(f"{kind}_")] for kind in map(_dashed, KINDS)}
        numbers = {name: int(name.rpartition("_")[2]) for name in self._entries}
        splits["train"] = [name for name, number in numbers.items() if number < FIRST_TEST_SCENARIO]
        splits["test"] = [name for name, number in numbers.items() if number >= FIRST_TEST_SCENARIO]
        return splits

    def _functions(self, task: str) -> dict[str, Any]:
        services = self._entries[task]["involved_classes"]
        return {name: each for service in services for name, each in self._documents[service].items()}

    def start(self, task: str) -> BfclEpisode:
        return BfclEpisode(self._entries[task], self._references[task], self._functions(task))

    def expert(self, task: str) -> list[str]:
        """Return for each request one turn with all calls of the reference, then a turn without a call."""
        functions = self._functions(task)
        commands = []
        for request in self._references[task]:
            calls = [_read(call, functions) for call in request]
            commands += [json.dumps(calls)] * bool(calls) + [json.dumps([])]
        return commands


def _dashed(kind: str) -> str:
    return kind.replace("_", "-")


def _lines(file: str) -> list[Any]:
    return [json.loads(line) for line in (DATA / file).read_text().splitlines()]


def _tools(functions: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the functions as tools in the form of OpenAI's API."""
    return [{"type": "function", "function": each} for each in functions]


def _schema(document: dict[str, Any]) -> dict[str, Any]:
    """Return a function's name and description, and its parameters as a JSON schema."""
    parameters = _typed(document["parameters"])
    return {"name": document["name"], "description": document["description"], "parameters": parameters}


def _typed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with the package's types replaced by those of JSON schema."""
    typed = {**schema, "type": GORILLA_TO_OPENAPI.get(schema.get("type", "string"), "string")}
    if "properties" in schema:
        typed["properties"] = {name: _typed(each) for name, each in schema["properties"].items()}
    if "items" in schema:
        typed["items"] = _typed(schema["items"])
    return typed


def _read(call: str, functions: dict[str, Any]) -> dict[str, Any]:
    """Return a call of the reference as name and arguments. Positional arguments get their names."""
    tree = ast.parse(call, mode="eval").body
    assert isinstance(tree, ast.Call), call
    assert isinstance(tree.func, ast.Name), call
    names = functions[tree.func.id]["parameters"]["properties"]
    values = dict(zip(names, map(ast.literal_eval, tree.args), strict=False))
    values |= {str(each.arg): ast.literal_eval(each.value) for each in tree.keywords}
    return {"name": tree.func.id, "arguments": values}


if __name__ == "__main__":
    serve(BfclWorld)
