"""Suggests known names for a misspelt one: verbs, keys, configs, environments and agents."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

_PLAIN: dict[str, tuple[type, ...]] = {
    **{"int": (int,), "float": (float, int), "str": (str, Path), "bool": (bool,)},
    "None": (type(None),),
}
Decorator = TypeVar("Decorator", bound=Callable[..., Any])


def nearest(name: str, known: Sequence[str], else_say: str | None = None) -> str:
    """Return the hint for a user whose name is not among ``known``.

    Args:
        else_say: the hint if no known name is similar; None lists all known keys.
    """
    if near := similar_names(name, known):
        return did_you_mean(near)
    return f"known keys: {', '.join(known)}" if else_say is None else else_say


def explain_type_error(error: TypeError, call: Callable[..., Any], first: str, given: Collection[str]) -> str:
    """Explain what is wrong with the options that a config has ``given`` to ``call``, in words that follow its name.

    Args:
        error: the call's error, which is quoted if the options fit the signature.
        first: the parameter of ``call`` that is not an option.
    """
    options, takes_any = _options(call, first)
    takes = [*options]
    needed = [name for name, option in options.items() if option.default is option.empty and name not in given]
    unknown = [] if takes_any else [name for name in given if name not in options]
    own = inspect.signature(call).parameters
    passes_on = any(each.kind is each.VAR_KEYWORD for each in own.values())
    if needed and (not unknown or (passes_on and own.keys() & needed)):
        cures = [f"{name!r}: {nearest(name, takes)}" for name in unknown]
        return "; ".join([f"needs {_listed(needed, 'and')}", *cures])
    wrong = f"{unknown[0]!r}; {nearest(unknown[0], takes)}" if unknown else error
    return f"was given options it does not take: {wrong}"


def _options(call: Callable[..., Any], first: str) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the options of ``call``, and whether it takes others. A class passes ``**options`` to its base."""
    classes = [each for each in getattr(call, "__mro__", ())[:-1] if "__init__" in vars(each)]
    options: dict[str, inspect.Parameter] = {}
    for each in classes or [call]:
        parameters = [own for own in inspect.signature(each).parameters.values() if own.name not in (first, *options)]
        takes_any = any(own.kind is own.VAR_KEYWORD for own in parameters)
        options |= {own.name: own for own in parameters if own.kind not in (own.VAR_POSITIONAL, own.VAR_KEYWORD)}
        if not takes_any:
            break
    return options, takes_any


def explained(decorator: Decorator) -> Decorator:
    """Make a decorator for users name, in its error, the unknown option and the option that was probably meant."""
    signature = inspect.signature(decorator)
    takes = [each.name for each in signature.parameters.values() if each.kind is each.KEYWORD_ONLY]

    @functools.wraps(decorator)
    def checked(*function: Any, **options: Any) -> Any:
        try:
            signature.bind(*function, **options)
        except TypeError as error:
            unknown = [f"no {name!r}; {nearest(name, takes)}" for name in options if name not in takes]
            wrong = unknown[0] if unknown else f"other arguments: {error}"
            wrong = wrong if takes else "no options; it stands without brackets"
            raise TypeError(f"@{decorator.__name__} takes {wrong}") from None
        return decorator(*function, **options)

    return cast(Decorator, checked)


def mistyped_option(call: Callable[..., Any], given: Mapping[str, Any]) -> str | None:
    """Return the error for an option that is not the number, text or truth value that ``call`` annotates, or None."""
    for name, parameter in _options(call, "")[0].items():
        says = getattr(parameter.annotation, "__name__", str(parameter.annotation)).split(" | ")
        if name not in given or not _PLAIN.keys() >= {*says}:
            continue
        kinds, value = [kind for each in says for kind in _PLAIN[each]], given[name]
        other = (isinstance(value, bool) and bool not in kinds) or value in (math.inf, -math.inf) or value != value
        if other or not isinstance(value, tuple(kinds)):
            cure = "; put quotes around it" if str in kinds and isinstance(value, int | float) else ""
            return f"{name} must be {kinds[0].__name__}, not {value!r}{cure}"
    return None


def did_you_mean(names: Sequence[str]) -> str:
    """Return the question "did you mean ...?" for ``names``."""
    return f"did you mean {_listed(names, 'or')}?"


def _listed(names: Sequence[str], word: str) -> str:
    *others, last = map(repr, names)
    return f"{', '.join(others)} {word} {last}" if others else last


def similar_names(name: str, known: Sequence[str], cutoff: float = 0.6) -> list[str]:
    """Return at most three of ``known`` that ``name`` may mean: names that differ only in capitals, dashes and dots,
    else names that begin with ``name`` or have all its words, else the name with the nearest spelling.

    Args:
        cutoff: the least likeness, as difflib's ``ratio`` measures it.
    """
    by_folded: dict[str, list[str]] = {}
    for each in known:
        by_folded.setdefault(folded(each), []).append(each)
    wanted = folded(name)
    words = {*wanted.split("_")}
    matches = [each for each in by_folded if each == wanted]
    if len(wanted) > 1:
        matches = matches or [each for each in by_folded if each.startswith(wanted)]
        matches = matches or [each for each in by_folded if words <= {*each.split("_")}]
    matches = matches or difflib.get_close_matches(wanted, by_folded, n=1, cutoff=cutoff)
    return sorted((each for one in matches for each in by_folded[one]), key=len)[:3]


def folded(name: str) -> str:
    """Return ``name`` without differences of capitals, dashes, dots and blanks."""
    return re.sub(r"[-. ]", "_", name.lower())
