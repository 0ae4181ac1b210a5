"""Checks the arguments of a call by a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jsonschema

from agent_environments.tools.tool import WrongArguments


def check_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Raise WrongArguments where a schema does not allow the arguments.

    A pattern of the schema may take for ever over a text, and holds its process meanwhile.
    """
    for error in jsonschema.validators.validator_for(schema)(schema).iter_errors(arguments):
        raise WrongArguments(f"{'.'.join(map(str, error.absolute_path)) or 'arguments'}: {error.message}")
