"""The environments by name, and how a document's environment is begun and called."""

from typing import Any

from mopdctl.environments.base import Environment, SetupError, ToolError
from mopdctl.environments.errands import Errands

ENVIRONMENTS: dict[str, Environment] = {environment.name: environment for environment in (Errands(),)}


def begin(document: Any) -> tuple[Environment, Any]:
    """The environment that `{"name": ..., "setup": ...}` names, and a fresh state of it.

    Raises SetupError naming what is wrong with the document.
    """
    name = document.get("name") if isinstance(document, dict) else None
    if not isinstance(name, str) or name not in ENVIRONMENTS:
        raise SetupError(f"environment {name!r} is unknown; use one of {', '.join(ENVIRONMENTS)}")
    return ENVIRONMENTS[name], ENVIRONMENTS[name].start(document.get("setup"))


def result_of(environment: Environment, state: Any, name: str, arguments: Any) -> str:
    """What a model gets to read of a call that it made; a call that fails is `error: ...` and changes nothing."""
    if not isinstance(arguments, dict):
        return 'error: a call is a JSON object of "name" and "arguments", and the arguments are a JSON object'
    try:
        return environment.call(state, name, arguments)
    except ToolError as error:
        return f"error: {error}"
