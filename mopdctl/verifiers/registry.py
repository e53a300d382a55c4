"""The verifiers by name, and the one function that runs them."""

from typing import Any

from mopdctl.verifiers.base import InvalidReferenceError, ParseError, Verdict, VerdictState, Verifier
from mopdctl.verifiers.constraints import constraints
from mopdctl.verifiers.exact import exact_match, integer
from mopdctl.verifiers.structured import json_equal
from mopdctl.verifiers.tool_call import tool_call

VERIFIERS: dict[str, Verifier] = {
    verifier.name: verifier
    for verifier in (
        Verifier("exact_match", 1, exact_match),
        Verifier("integer", 1, integer),
        Verifier("json_equal", 1, json_equal),
        Verifier("constraints", 1, constraints),
        Verifier("tool_call", 1, tool_call),
    )
}


def verify(name: str, response: str, reference: Any) -> Verdict:
    """Scores one response. KeyError for an unknown verifier; a bad response or reference is a state, not an error."""
    verifier = VERIFIERS[name]
    try:
        reward, detail = verifier.check(response, reference)
    except ParseError as error:
        return Verdict(VerdictState.PARSE_ERROR, None, name, verifier.version, str(error))
    except (InvalidReferenceError, TypeError, RecursionError) as error:
        return Verdict(VerdictState.INVALID_REFERENCE, None, name, verifier.version, str(error))
    return Verdict(VerdictState.OK, reward, name, verifier.version, detail)
