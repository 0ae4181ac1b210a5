"""Names that were meant, for one that is not known: of verbs, keys, configs, environments and agents."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_PLAIN: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "str": (str,), "bool": (bool,)}
_MISSING = re.compile(r".+\(\) missing \d+ required (positional|keyword-only) arguments?: (?P<options>.+)")
_UNEXPECTED = re.compile(r"(?P<call>[\w.]+)\(\) got an unexpected keyword argument '(?P<option>\w+)'")


def nearest(name: str, known: Sequence[str], else_say: str | None = None) -> str:
    """Return the cure for a name that is not among ``known``.

    Args:
        else_say: the cure where nothing known is like it; None names all known keys.
    """
    if near := alike(name, known):
        return did_you_mean(near)
    return f"known keys: {', '.join(known)}" if else_say is None else else_say


def misfit(error: BaseException, call: Callable[..., Any], first: str, given: Sequence[str]) -> str:
    """Return what is wrong with the options that a config has ``given`` to ``call``, as what follows its name.

    Args:
        first: the parameter of ``call`` that is no option.
    """
    if needs := missing_options(error, call, first, given):
        return f"needs {needs}"
    return f"was given options it does not take: {unexpected_option(error, call, first) or error}"


def mistyped_option(call: Callable[..., Any], given: Mapping[str, Any]) -> str | None:
    """Return which option is no number, text or truth value where ``call`` says that it is one; None where all are."""
    for name, parameter in inspect.signature(call).parameters.items():
        kind = _PLAIN.get(getattr(parameter.annotation, "__name__", str(parameter.annotation)))
        if kind is None or name not in given:
            continue
        value = given[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kind):
            return f"{name} must be {kind[0].__name__}, not {value!r}"
    return None


def unexpected_option(error: BaseException, call: Callable[..., Any], first: str) -> str | None:
    """Return which option ``call`` was given and does not take, and the cure; None where ``error`` says something else.

    Args:
        first: the parameter of ``call`` that is no option.
    """
    found = _UNEXPECTED.fullmatch(str(error))
    classes = {each.__name__: each for each in getattr(call, "__mro__", (call,))}
    if found is None or (taker := classes.get(found["call"].partition(".")[0])) is None:
        return None
    takes = [*dict.fromkeys([*_options(call, first), *_options(taker, first)])]  # one passes some on to the other
    return f"{found['option']!r}; {nearest(found['option'], takes)}"


def missing_options(error: BaseException, call: Callable[..., Any], first: str, given: Sequence[str]) -> str | None:
    """Return which options ``call`` needs and was not given, and which of those ``given`` may be meant for one of them;
    None where ``error`` says something else.
    """
    if (found := _MISSING.fullmatch(str(error))) is None:
        return None
    takes = _options(call, first)
    others = [f"; {name!r}: {nearest(name, takes)}" for name in given if name not in takes]
    return f"{found['options']}{''.join(others)}"


def _options(call: Callable[..., Any], first: str) -> list[str]:
    parameters = inspect.signature(call).parameters.values()
    return [each.name for each in parameters if each.name != first and each.kind is not each.VAR_KEYWORD]


def did_you_mean(names: Sequence[str]) -> str:
    """Return the question that offers one of ``names``."""
    *others, last = map(repr, names)
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?"


def alike(name: str, known: Sequence[str], cutoff: float = 0.6) -> list[str]:
    """Return those of ``known`` that ``name`` may stand for, at most three: the same but for capitals, dashes and dots,
    else those that it begins or all words of which they have, else the one that is spelt most like it.

    Args:
        cutoff: how much like it, as difflib's ``ratio`` says.
    """
    by_folded: dict[str, list[str]] = {}
    for each in known:
        by_folded.setdefault(folded(each), []).append(each)
    wanted = folded(name)
    words = {*wanted.split("_")}
    found = [each for each in by_folded if each == wanted]
    if len(wanted) > 1:
        found = found or [each for each in by_folded if each.startswith(wanted)]
        found = found or [each for each in by_folded if words <= {*each.split("_")}]
    found = found or difflib.get_close_matches(wanted, by_folded, n=1, cutoff=cutoff)
    return sorted((each for one in found for each in by_folded[one]), key=len)[:3]


def folded(name: str) -> str:
    """Return ``name`` as all who mean the same may write it."""
    return re.sub(r"[-. ]", "_", name.lower())
