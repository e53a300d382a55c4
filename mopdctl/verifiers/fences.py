"""Which part of a response is the answer: no reasoning before it, no Markdown fence around it. By named rules."""

from mopdctl.verifiers.base import ParseError

_OPEN, _CLOSE = "<think>", "</think>"
TOOL_CALL_OPEN = "<tool_call>"
_FENCE = "```"

FENCE_RULES = ("none", "optional", "whole", "first")
"""`none`: the text as it stands. `optional`: a text that begins with a fence has to be one fence as a whole, any other
is taken as it stands. `whole`: the text has to be one fence. `first`: the first fence, whatever stands around it."""


def answer(response: str) -> str:
    """The response without its reasoning: what stands after the last `</think>`, whether or not `<think>` opened it.

    Chat templates put the opening tag into the prompt, so that the closing one may stand alone (huggingface/trl #6363).
    Raises ParseError for a block that is still open at the end: the model was cut off or never came to an answer.
    """
    text = response[response.rfind(_CLOSE) + len(_CLOSE) :] if _CLOSE in response else response
    if _OPEN in text:
        raise ParseError(f"{_OPEN} is not closed, so that there is no answer")
    return text


def without_reasoning(response: str) -> str:
    """The same for a response that may hold these tags as data, in the arguments of a call: its first block goes.

    A response that opens with `<think>` is cut after its first `</think>`. A `</think>` that no `<think>` opened ends
    the reasoning too, if no tool call comes before it. Raises ParseError for reasoning that never ends.
    """
    opened = response.lstrip().startswith(_OPEN)
    end = response.find(_CLOSE)
    if opened and end < 0:
        raise ParseError("the reasoning never ends")
    first_call = response.find(TOOL_CALL_OPEN)
    if end < 0 or (not opened and 0 <= first_call < end):
        return response
    return response[end + len(_CLOSE) :]


def unfenced(text: str, rule: str, languages: tuple[str, ...]) -> str:
    """The document in `text` by one of FENCE_RULES.

    A fence is a line of three backticks with nothing or one of `languages` behind them, up to the next line of three
    backticks. Raises ParseError for a fence that is missing, not closed, in another language, or not the whole text.
    """
    if rule not in FENCE_RULES:
        raise ValueError(f"no fence rule {rule!r}")
    if rule == "none" or (rule == "optional" and not text.lstrip().startswith(_FENCE)):
        return text
    lines = text.strip().split("\n")
    first = next((at for at, line in enumerate(lines) if line.strip().startswith(_FENCE)), None)
    if first is None:
        raise ParseError("no fence")
    last = next((at for at in range(first + 1, len(lines)) if lines[at].strip() == _FENCE), None)
    if last is None:
        raise ParseError("the fence is not closed")
    if rule != "first" and (first, last) != (0, len(lines) - 1):
        raise ParseError("text outside the fence")
    language = lines[first].strip().removeprefix(_FENCE)
    if language and language not in languages:
        raise ParseError(f"a fence of {language[:40]!r}, not {' or '.join(languages)}")
    return "\n".join(lines[first + 1 : last])
