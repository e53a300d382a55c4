"""The verifiers by name, and the one function that runs them."""

import atexit
import math
import os
from typing import TYPE_CHECKING, Any

from mopdctl.verifiers.abstention import abstention
from mopdctl.verifiers.action import action
from mopdctl.verifiers.base import (
    Attempt,
    InvalidReferenceError,
    ParseError,
    Verdict,
    VerdictState,
    Verifier,
    check_depth,
)
from mopdctl.verifiers.code import code
from mopdctl.verifiers.constraints import constraints
from mopdctl.verifiers.exact import exact_match, integer
from mopdctl.verifiers.limits import LimitError
from mopdctl.verifiers.math import math_answer
from mopdctl.verifiers.state_replay import state_replay
from mopdctl.verifiers.structured import json_equal, structured
from mopdctl.verifiers.tool_call import tool_call

if TYPE_CHECKING:
    from mopdctl.verifiers.pool import VerifierPool

VERIFIERS: dict[str, Verifier] = {
    verifier.name: verifier
    for verifier in (
        Verifier("exact_match", 2, exact_match),
        Verifier("integer", 2, integer),
        Verifier("math", 1, math_answer, isolated=True),
        Verifier("json_equal", 2, json_equal),
        Verifier("structured", 1, structured, isolated=True),
        Verifier("constraints", 2, constraints),
        Verifier("abstention", 1, abstention, isolated=True),
        Verifier("code", 1, code, isolated=True),
        Verifier("tool_call", 2, tool_call),
        Verifier("action", 1, action),
        Verifier("state_replay", 1, state_replay),
    )
}


_MOST_DETAIL = 1_000
"""Characters of a detail. It may quote the response, which is as long as it likes."""


def verify(name: str, response: str, reference: Any) -> Verdict:
    """Scores one response that stands for itself. KeyError for an unknown verifier; see `run_check` for the rest.

    An isolated verifier runs in a worker of a pool that starts with the first of them, with the default `Limits`.
    """
    verifier, attempt = VERIFIERS[name], Attempt(response, reference)
    if not verifier.isolated:
        return run_check(verifier, attempt)
    from mopdctl.verifiers.pool import VerifierPool  # the workers of a pool load this module

    pool = _pools.get(os.getpid())
    if pool is None:
        pool = _pools.setdefault(os.getpid(), VerifierPool())
        atexit.register(pool.close)
    return pool.check([(name, attempt)])[0]


_pools: "dict[int, VerifierPool]" = {}
"""The pool that `verify` uses, by process id: a process that is forked off needs its own."""


def run_check(verifier: Verifier, attempt: Attempt) -> Verdict:
    """Runs a check in this process. A bad response, a bad reference and a broken check are states, never errors.

    A check that runs out of stack or memory is a `timeout`: the reference is no deeper than MOST_DEPTH, so it is the
    response that is. Any other exception than those of `Verifier.check` is a defect of the check, an `infra_error`.
    """

    def verdict(state: VerdictState, detail: str) -> Verdict:
        return Verdict(state, None, verifier.name, verifier.version, detail[:_MOST_DETAIL])

    try:
        check_depth(attempt)
        reward, detail, label = verifier.check(attempt)
    except ParseError as error:
        return verdict(VerdictState.PARSE_ERROR, str(error))
    except InvalidReferenceError as error:
        return verdict(VerdictState.INVALID_REFERENCE, str(error))
    except LimitError as error:
        return verdict(VerdictState.TIMEOUT, str(error))
    except MemoryError:
        return verdict(VerdictState.TIMEOUT, "memory: asked for more than the limit in one go")
    except RecursionError:
        return verdict(VerdictState.TIMEOUT, "memory: ran out of stack")
    except Exception as error:
        return verdict(VerdictState.INFRA_ERROR, f"{type(error).__name__}: {error}")
    if not (math.isfinite(reward) and 0 <= reward <= 1):
        return verdict(VerdictState.INFRA_ERROR, f"a reward of {reward}; it has to lie in [0, 1]")
    return Verdict(VerdictState.OK, float(reward), verifier.name, verifier.version, detail[:_MOST_DETAIL], label)
