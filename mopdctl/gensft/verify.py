"""Checking an answer with the verifier that its seed names."""

import difflib
import json

from mopdctl.errors import InputError
from mopdctl.gensft.records import Answer, Message, Seed
from mopdctl.verifiers import VERIFIERS, verify
from mopdctl.verifiers.base import ParseError
from mopdctl.verifiers.structured import parse_json


def check_verifier(seed: Seed) -> None:
    """Raises InputError if the seed names a verifier that there is not."""
    if seed.verifier is None or seed.verifier in VERIFIERS:
        return
    near = difflib.get_close_matches(seed.verifier, VERIFIERS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(VERIFIERS)}"
    raise InputError(f"{seed.place}: unknown verifier {seed.verifier!r}; {hint}")


def verify_answer(seed: Seed, answer: Answer) -> tuple[str | None, float | None, int | None]:
    """State, reward in [0, 1] and version of the seed's verifier; the reward is None unless the state is `ok`.

    All three are None where there is nothing to check: a seed without a verifier, or an answer whose state is not `ok`.
    The verifier sees the answer without its reasoning.
    """
    if seed.verifier is None or answer.state != "ok":
        return None, None, None
    verdict = verify(seed.verifier, _response(answer.message, seed.verifier), seed.reference)
    return str(verdict.state), verdict.reward, verdict.version


def _response(message: Message, verifier: str) -> str:
    """The text that is checked. For `tool_call` the calls alone: what is said beside them is no part of them."""
    calls = message.get("tool_calls")
    if verifier != "tool_call" or not calls:
        return str(message["content"])
    return "\n".join(_written(call["function"]["name"], call["function"]["arguments"]) for call in calls)


def _written(name: str, arguments: str) -> str:
    """One call as the verifier reads it. Unreadable arguments become a text, which it takes for no call."""
    text = f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'
    try:
        call = json.dumps(parse_json(text))
    except (ParseError, RecursionError):
        call = json.dumps(text)
    # Escaped, because the verifier looks for the closing tag before it reads the JSON.
    return "<tool_call>" + call.replace("<", "\\u003c") + "</tool_call>"
