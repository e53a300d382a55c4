"""A candidate as a prompt that a model can be asked and a verifier can judge."""

import json

from mopdctl.errors import InputError
from mopdctl.pivots.candidates import Candidate
from mopdctl.pivots.responses import without_items
from mopdctl.records import Prompt
from mopdctl.train.data import row_messages, row_tools
from mopdctl.verifiers.base import MOST_DEPTH, Attempt, VerdictState, deeper_than
from mopdctl.verifiers.registry import VERIFIERS, run_check

VERIFIER = VERIFIERS["action"]


def prompt_of(candidate: Candidate, place: str) -> Prompt:
    """The state as messages that chat templates take, the action as the reference.

    Raises InputError for messages or tools that no prompt can hold. Arguments of an earlier call that are a JSON object
    become a mapping there, which only then shows numbers that are not finite and half characters.
    """
    messages = row_messages({"messages": [without_items(message) for message in candidate.messages]}, place)
    tools = row_tools({"tools": list(candidate.tools or ())}, place)
    if deeper_than(messages, MOST_DEPTH) or deeper_than(tools, MOST_DEPTH):
        raise InputError(f"{place}: nested deeper than {MOST_DEPTH} levels")
    try:
        json.dumps([messages, tools], ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise InputError(f"{place}: holds half a character (a lone surrogate)") from None
    except ValueError as error:
        raise InputError(f"{place}: holds what JSON cannot ({error})") from None
    return Prompt(
        prompt_id=candidate.candidate_id,
        messages=tuple(messages),
        tools=tuple(tools) if tools else None,
        routing={"domain": candidate.domain},
        reference=candidate.action,
        verifier=VERIFIER.name,
        place=place,
    )


def reference_problem(prompt: Prompt) -> str:
    """Why the verifier cannot use the expert's action as its reference; empty if it can."""
    tried = run_check(VERIFIER, Attempt("", prompt.reference, prompt.messages, prompt.tools))
    return tried.detail if tried.state is VerdictState.INVALID_REFERENCE else ""
