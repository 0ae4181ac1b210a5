"""``@tool``: a Python function, or a method of the instance's class, as a tool.

Name, description and JSON schema come from the function's name, docstring and type hints. pydantic makes the schema and
checks the arguments, docstring-parser reads the docstring (Google, NumPy, reST).
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints, overload

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from agent_environments.tools.tool import (
    DEADLINE_S,
    MAX_CHARACTERS,
    CodeSession,
    Tool,
    ToolError,
    WrongArguments,
    as_text,
    packed,
    unpacked,
)
from loop_plumbing import deadline
from loop_plumbing.names import explained

if TYPE_CHECKING:
    from loop_plumbing.forked_process import ForkedProcess

_DOCSTRING_SECTIONS = re.compile(
    r"^(?:Args|Arguments|Parameters|Params|Attributes|Returns?|Yields?|Raises|Exceptions):[ ]*\n(?:[ ].*\n|\n)+"
    r"|^(?:Other )?(?:Parameters|Attributes|Returns|Yields|Raises)\n-{3,}\n"
    r"(?:(?!.+\n-{3})(?:[*\w]+(?:, *[*\w]+)*(?: :.*)?\n|.*[^:\n]\n(?=[ ])|[ ].*\n|\n))*"
    r"|^[:@](?:param|type|arg|key|return|rtype|raise|yield|var)[^\n:]*:.*\n(?:[ ].*\n)*\n*",
    re.MULTILINE,
)
"""Sections of a docstring on parameters, which the schema has, and on results: Google's, NumPy's and Sphinx's form."""
CODE_FOLDER = "code_folder"
"""The parameter that gets the files of the agent's code."""
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class OwnFunction:
    """A user's function, or a method of the instance's class (``stateful``). Calling this object from Python calls the
    function itself.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        called = callable_of(function)
        functools.update_wrapper(self, called)
        self.function = called
        self.__name__: str = name_of(called)
        self.passed = parameters_of(called)
        self.stateful = not isinstance(function, staticmethod) and list(self.passed)[:1] == ["self"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return types.MethodType(self.function, instance) if instance is not None and self.stateful else self

    def bound(self, instance: Any) -> Callable[..., Any]:
        """Return the function, or the method bound to ``instance``."""
        return types.MethodType(self.function, instance) if self.stateful else self.function


class FunctionTool(OwnFunction, Tool):
    """A function that the policy can call; :func:`tool` makes such objects."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None,
        description: str | None,
        terminal: bool,
        max_characters: int,
        deadline_s: float,
    ) -> None:
        super().__init__(function)
        self.name = self.__name__ if name is None else name
        self.terminal = terminal
        self.max_characters = max_characters
        self.deadline_s = deadline_s
        self.takes_code_folder = CODE_FOLDER in self.passed
        self._session: CodeSession | None = None
        whole = inspect.cleandoc(_written(self.function)[2])
        try:
            doc = docstring_parser.parse(whole)
        except Exception:  # it raises IndexError, among others, over colons in odd places
            doc = docstring_parser.Docstring()
        descriptions = [(name, param.description) for param in doc.params for name in param.arg_name.split(",")]
        self._parameter_descriptions = {name.strip().lstrip("*"): text for name, text in descriptions}
        own = _DOCSTRING_SECTIONS.sub("", f"{whole}\n").strip() or whole.strip()
        self.description = own if description is None else description

    @functools.cached_property
    def _model(self) -> type[BaseModel]:
        """The pydantic model of the arguments; built at its first use, when all names in the type hints are known.

        Fields have numbers, and aliases that are the parameters' names, which may be any (``schema``, ``_x``).

        Raises:
            ValueError: no JSON schema can express the signature.
        """
        try:
            hints = get_type_hints(_written(self.function)[0], include_extras=True)
        except Exception as error:
            raise ValueError(f"tool {self.name}: its type hints cannot be read: {error}") from error
        fields: dict[str, Any] = {}
        for parameter in self._parameters():
            if parameter.kind not in NAMED:
                raise ValueError(f"tool {self.name}: parameter {parameter} must be one that can be passed by name")
            if parameter.name not in hints:
                raise ValueError(f"tool {self.name}: parameter {parameter.name} needs a type hint")
            default = ... if parameter.default is parameter.empty else parameter.default
            hint = hints[parameter.name]
            text = _description_of(hint, default) or self._parameter_descriptions.get(parameter.name)
            try:
                field: Any = Annotated[hint, Field(alias=parameter.name, description=text)]
            except Exception as error:  # a value, such as ... or 3
                raise ValueError(f"tool {self.name}: parameter {parameter.name}: {hint!r} is not a type") from error
            fields[f"field{len(fields)}"] = field if default is ... else (field, default)
        try:
            return create_model(self.name, __config__=ConfigDict(extra="forbid", allow_inf_nan=False), **fields)
        except PydanticUserError as error:
            raise ValueError(f"tool {self.name}: {error.message}") from error

    def _parameters(self) -> list[inspect.Parameter]:
        """Return the parameters that the policy passes."""
        own = list(self.passed.values())[1 if self.stateful else 0 :]
        return [parameter for parameter in own if parameter.name != CODE_FOLDER]

    @functools.cached_property
    def parameters(self) -> dict[str, Any]:
        try:
            schema = self._model.model_json_schema(schema_generator=_Untitled)
        except PydanticUserError as error:
            raise ValueError(f"tool {self.name}: {error.message}") from error
        for key in ("title", "additionalProperties"):
            schema.pop(key)
        schema.setdefault("properties", {})
        return schema

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Check the arguments and convert them to the types of the function's hints.

        Raises:
            WrongArguments: the function does not take these arguments.
        """
        try:
            checked = self._model.model_validate(dict(arguments))
        except ValidationError as error:
            raise WrongArguments(_complaints(error)) from error
        # An argument that was not passed keeps the default of the function itself, where that is a value.
        values = zip(self._parameters(), self._model.model_fields, strict=True)
        passed = {
            parameter.name: getattr(checked, name)
            for parameter, name in values
            if name in checked.model_fields_set
            or parameter.default is parameter.empty
            or isinstance(parameter.default, FieldInfo)
        }
        if wrong := next((name for name, value in passed.items() if name in arguments and not _finite(value)), None):
            raise WrongArguments(f"{wrong}: Input should be a finite number")
        return passed

    def in_folder(self, session: CodeSession) -> FunctionTool:
        if not self.takes_code_folder:
            return self
        tool = copy.copy(self)
        tool._session = session
        return tool

    async def call(self, arguments: Mapping[str, Any], process: ForkedProcess) -> str:
        asked = {"tool": self.name, "arguments": dict(arguments)}
        if self._session is not None:
            asked[CODE_FOLDER] = packed(await self._session.left_files())
        try:
            called = await process.ask("call", self.deadline_s, **asked)
        except deadline.Raised as error:
            raise ToolError(str(error)) from error
        if self._session is not None:
            await self._session.change(unpacked(called["changed"]))
        return str(called["text"])

    def run(self, arguments: Mapping[str, Any], instance: Any, code_folder: dict[str, Any] | None = None) -> str:
        """Check the arguments and make the call in this process; return the result as text.

        Args:
            code_folder: the files of the agent's code by name, which the function may change.

        Raises:
            WrongArguments, Raised, DeadlinePassed: the arguments are wrong, or the function raised or took too long.
            ToolError: the result cannot be shown as text.
        """
        checked = deadline.call(self.check, {"arguments": arguments}, self.deadline_s, through=(WrongArguments,))
        if self.takes_code_folder:
            checked[CODE_FOLDER] = code_folder
        return result_text(deadline.call(self.bound(instance), checked, self.deadline_s), self.deadline_s)


def result_text(result: Any, deadline_s: float) -> str:
    """Return a function's result as text.

    Raises:
        ToolError: the result has no text. Raised, DeadlinePassed: a method of the result raised, or took too long.
    """
    try:
        return str(deadline.call(as_text, {"result": result}, deadline_s, through=(ValueError,)))
    except ValueError as error:
        raise ToolError(f"its result cannot be shown: {error}") from error


def callable_of(function: Any) -> Callable[..., Any]:
    """Return the function that runs when a decorated object is called; for a static method, the underlying function.

    Raises:
        ValueError: the decorated object is not a function, or is a generator.
    """
    called = function.__func__ if isinstance(function, staticmethod) else function
    if not callable(called) or isinstance(called, type):
        raise ValueError(f"{called!r} is not a function; the decorator stands in front of `def`")
    if inspect.isasyncgenfunction(_written(called)[0]):
        raise ValueError(f"{name_of(called)} yields; let it return its result whole")
    return called


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name; for a partial, its function's name; for a callable object, its class's name."""
    return str(_written(function)[1])


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function, without those that a partial has already bound."""
    bound = function.keywords if isinstance(function, functools.partial) else {}
    parameters = inspect.signature(function).parameters
    return {name: parameter for name, parameter in parameters.items() if name not in bound}


def _written(function: Any) -> tuple[Callable[..., Any], str, str]:
    """Return the function that the user wrote, with its type hints, its name, and its docstring."""
    while isinstance(function, functools.partial):
        function = function.func
    if hasattr(function, "__name__"):
        return function, function.__name__, function.__doc__ or ""
    kind = type(function)
    return kind.__call__, kind.__name__, kind.__call__.__doc__ or kind.__doc__ or ""


def _description_of(hint: Any, default: Any) -> str | None:
    """Return a parameter's description from its type hint or default: pydantic's Field, a text, or typing's Doc."""
    field = FieldInfo.from_annotation(hint) if default is ... else FieldInfo.from_annotated_attribute(hint, default)
    if field.description is not None:
        return field.description
    texts = [getattr(each, "documentation", each) for each in field.metadata]
    return next((text for text in texts if isinstance(text, str)), None)


class _Untitled(GenerateJsonSchema):
    """Write a schema without titles, because titles only repeat the names and cost tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _finite(value: Any) -> bool:
    """Return whether an argument holds neither NaN nor infinity, apart from defaults; pydantic does not check users'
    models or Any."""
    if isinstance(value, BaseModel):
        value = [getattr(value, name) for name in value.model_fields_set]
    elif is_dataclass(value):  # a dataclass does not know which fields were passed
        value = [item for each in fields(value) if (item := getattr(value, each.name)) is not each.default]
    elif isinstance(value, Mapping):
        value = value.values()
    if isinstance(value, Collection) and not isinstance(value, str | bytes):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _complaints(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, item['loc'])) or 'arguments'}: {item['msg']}" for item in error.errors())


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    terminal: bool = False,
    max_characters: int = MAX_CHARACTERS,
    deadline_s: float = DEADLINE_S,
) -> Callable[[Callable[..., Any]], FunctionTool]: ...


@explained
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    terminal: bool = False,
    max_characters: int = MAX_CHARACTERS,
    deadline_s: float = DEADLINE_S,
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Make a tool from a sync or async function; a tool from a method works on the episode's own instance.

    Args:
        name: the tool's name; by default the function's name.
        description: by default the docstring without its sections on parameters, results and errors.
        terminal: whether a successful call ends the episode; its result is then the answer that the reward judges.
        max_characters: the length at which a result is cut.
        deadline_s: seconds for a call. If a stateless tool takes longer, the policy gets an error. If a stateful tool
            takes longer, the episode ends, because the instance may still be changing.
    """

    def decorate(function: Callable[..., Any]) -> FunctionTool:
        return FunctionTool(function, name, description, terminal, max_characters, deadline_s)

    return decorate if function is None else decorate(function)
