"""The verifiers by name, and the one function that runs them."""

import math
from typing import Any

from mopdctl.verifiers.base import Attempt, InvalidReferenceError, ParseError, Verdict, VerdictState, Verifier
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
    """Scores one response that stands for itself. KeyError for an unknown verifier; see `run_check` for the rest."""
    return run_check(VERIFIERS[name], Attempt(response, reference))


def run_check(verifier: Verifier, attempt: Attempt) -> Verdict:
    """Runs a check in this process. A bad response, a bad reference and a broken check are states, never errors."""

    def verdict(state: VerdictState, detail: str) -> Verdict:
        return Verdict(state, None, verifier.name, verifier.version, detail)

    try:
        reward, detail, label = verifier.check(attempt)
    except ParseError as error:
        return verdict(VerdictState.PARSE_ERROR, str(error))
    except InvalidReferenceError as error:
        return verdict(VerdictState.INVALID_REFERENCE, str(error))
    except (TypeError, RecursionError) as error:  # checks take any JSON for a reference
        return verdict(VerdictState.INVALID_REFERENCE, str(error))
    except Exception as error:
        return verdict(VerdictState.INFRA_ERROR, f"{type(error).__name__}: {error}")
    if not (math.isfinite(reward) and 0 <= reward <= 1):
        return verdict(VerdictState.INFRA_ERROR, f"a reward of {reward}; it has to lie in [0, 1]")
    return Verdict(VerdictState.OK, float(reward), verifier.name, verifier.version, detail, label)
