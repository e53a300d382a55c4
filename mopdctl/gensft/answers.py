"""From a stored `chat.completion` document to an assistant message and the state of the answer.

Raw responses are kept as they came and parsed as often as needed, so everything here is a pure function of the document
and no document raises: what cannot be read is a state with a reason.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mopdctl.gensft.records import AnswerState

_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # DeepSeek and older vLLM, newer vLLM, Harmony
_CUT = ("length", "max_tokens")
_DONE = ("stop", "tool_calls", "function_call")
_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """One answer in the form in which rows hold it."""

    state: AnswerState
    message: dict[str, Any]
    """`role`, `content` (text, never None); `reasoning_content` and `tool_calls` only where there are any. A tool call
    is `{"id", "type": "function", "function": {"name", "arguments"}}`, the arguments as the model wrote them."""
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    """Tokens of the whole response by the server's count; None if it gave none."""
    detail: str = ""
    """One line for a human: why the state is not `ok`."""
    notes: tuple[str, ...] = ()
    """Names of what was unusual or had to be moved, for counting."""


class _MalformedError(ValueError):
    """The document is no chat completion; the message says why."""


def usage(raw: Any) -> tuple[int | None, int | None]:
    """Prompt and answer tokens of a response as the server counted them; None where it did not, or absurdly."""
    found = raw.get("usage") if isinstance(raw, Mapping) else None
    counts = [
        found.get(name) if isinstance(found, Mapping) else None for name in ("prompt_tokens", "completion_tokens")
    ]
    prompt, completion = (c if type(c) is int and 0 <= c < 2**53 else None for c in counts)
    return prompt, completion


def parse_answer(raw: Any, *, requested_n: int = 1, choice: int = 0) -> ParsedAnswer:
    """The answer in choice number `choice` of an OpenAI `chat.completion` document. Never raises for a JSON value.

    A response with another number of choices than `requested_n` is malformed as a whole, so that none is lost.
    """
    prompt_tokens, completion_tokens = usage(raw)
    notes = [] if None not in (prompt_tokens, completion_tokens) else ["usage_missing"]
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    finish_reason = None
    try:
        found = _choice(raw, requested_n, choice)
        if isinstance(found.get("finish_reason"), str):
            finish_reason = _one_line(found["finish_reason"])
        state, detail = _read_message(found, message, notes)
    except _MalformedError as error:
        state, detail = AnswerState.MALFORMED, str(error)
    except RecursionError:  # while something inside was written out
        state, detail = AnswerState.MALFORMED, "nested too deep"
    if finish_reason in _CUT:
        state, detail = AnswerState.TRUNCATED, f"finish_reason is {finish_reason!r}; raise max_tokens"
    return ParsedAnswer(
        state, message, finish_reason, prompt_tokens, completion_tokens, _one_line(detail), tuple(dict.fromkeys(notes))
    )


def is_json_object(text: str) -> bool:
    """Whether `text` is one strict JSON object, as the arguments of a tool call have to be."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def text_of(content: Any) -> str:
    """The text of a message's content: the string itself, or the text blocks of a list joined; else empty."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = [block.get("text") if isinstance(block, Mapping) else block for block in content]
    return "".join(text for text in texts if isinstance(text, str))


def _choice(raw: Any, requested_n: int, choice: int) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise _MalformedError(f"a {type(raw).__name__} where a JSON object is needed")
    choices = raw.get("choices")
    if not isinstance(choices, list):
        error = raw.get("error")
        message = error.get("message") if isinstance(error, Mapping) else error
        raise _MalformedError(f"error document: {message}" if error else "no list 'choices'")
    if len(choices) != requested_n:
        raise _MalformedError(f"{len(choices)} choices where {requested_n} were asked for")
    found = choices[choice]
    if not isinstance(found, Mapping) or not isinstance(found.get("message"), Mapping):
        raise _MalformedError(f"choice {choice} has no 'message'")
    return found


def _read_message(choice: Mapping[str, Any], message: dict[str, Any], notes: list[str]) -> tuple[AnswerState, str]:
    """Fills `message` and `notes`. Returns the state, token limit aside, and its reason."""
    source = choice["message"]
    if source.get("role") not in (None, "assistant"):
        raise _MalformedError(f"the message has the role {source['role']!r}")
    content, thoughts, refusal = _read_content(source, notes)
    fields = [_text(source, field) for field in _REASONING_FIELDS]
    content, inline, closed = _split_think(content, notes)
    thoughts = list(dict.fromkeys(part for part in [*fields, *thoughts, *inline] if part.strip()))
    calls = _read_calls(source, notes)
    filled: dict[str, Any] = {"role": "assistant", "content": content}
    if thoughts:
        filled["reasoning_content"] = "\n\n".join(thoughts)
        if thoughts != fields[:1]:
            notes.append("reasoning_moved")
        if len(thoughts) > 1:
            notes.append("reasoning_joined")
    if calls:
        filled["tool_calls"] = calls
    try:
        json.dumps(filled, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _MalformedError("holds half a character (a lone surrogate)") from None
    message.update(filled)
    return _ending(choice.get("finish_reason"), message, refusal=refusal, closed=closed)


def _ending(finish_reason: Any, message: Mapping[str, Any], *, refusal: str, closed: bool) -> tuple[AnswerState, str]:
    if finish_reason == "content_filter":
        return AnswerState.REFUSED, "the server's content filter"
    if refusal:
        return AnswerState.REFUSED, refusal
    if finish_reason not in (*_DONE, *_CUT):
        return AnswerState.MALFORMED, f"finish_reason {finish_reason!r} does not say that the answer is complete"
    if not closed:
        return AnswerState.TRUNCATED, "thinking began and did not end; raise max_tokens"
    if finish_reason in ("tool_calls", "function_call") and "tool_calls" not in message:
        return AnswerState.MALFORMED, f"finish_reason is {finish_reason!r}, but the message has no tool calls"
    if not message["content"].strip() and "tool_calls" not in message:
        return AnswerState.EMPTY, "only reasoning" if "reasoning_content" in message else "no text and no tool call"
    return AnswerState.OK, ""


def _read_content(source: Mapping[str, Any], notes: list[str]) -> tuple[str, list[str], str]:
    """The text, the reasoning in blocks of its own, and the words of a refusal."""
    refusal = _text(source, "refusal")
    content = source.get("content")
    if content is None:
        notes.append("content_was_null")
    if isinstance(content, str | None):
        return content or "", [], refusal
    if not isinstance(content, list):
        raise _MalformedError(f"'content' is a {type(content).__name__} where text is needed")
    notes.append("content_was_blocks")
    texts, thoughts = [], []
    for block in content:
        match block:
            case str(text) | {"type": "text" | "output_text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str() | list() as thought}:
                thoughts.append(text_of(thought))
            case {"type": "reasoning", "text": str(text)}:
                thoughts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                refusal = text
            case _:
                raise _MalformedError(f"'content' has a block that is no text: {block!r}")
    return "".join(texts), thoughts, refusal


def _split_think(content: str, notes: list[str]) -> tuple[str, list[str], bool]:
    """Content without the thinking that it begins with, that thinking, and whether it came to its end."""
    thoughts = []
    while (rest := content.lstrip()).startswith(_OPEN):
        thought, close, after = rest.removeprefix(_OPEN).partition(_CLOSE)
        thoughts.append(thought.strip())
        if not close:
            notes.append("think_unclosed")
            return "", thoughts, False
        content = after.lstrip()
    before, close, after = content.partition(_CLOSE)
    if close and not thoughts and _OPEN not in before:  # the opening tag was part of the prompt
        notes.append("think_close_only")
        return after.lstrip(), [before.strip()], True
    return content, thoughts, True


def _read_calls(source: Mapping[str, Any], notes: list[str]) -> list[dict[str, Any]]:
    calls = source.get("tool_calls")
    if not calls and (old := source.get("function_call")) is not None:
        notes.append("function_call_used")
        calls = [{"function": old}]
    if not isinstance(calls, list | None):
        raise _MalformedError(f"'tool_calls' is a {type(calls).__name__} where a list is needed")
    return [_read_call(call, number, notes) for number, call in enumerate(calls or ())]


def _read_call(call: Any, number: int, notes: list[str]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise _MalformedError(f"tool call {number} has no function with a name")
    call_id = call.get("id")
    if not isinstance(call_id, str | int | None):
        raise _MalformedError(f"tool call {number} has an id that is a {type(call_id).__name__}")
    if call_id in (None, ""):
        notes.append("tool_call_id_missing")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = ""
    elif not isinstance(arguments, str):
        notes.append("arguments_were_not_text")
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not is_json_object(arguments):
        notes.append("arguments_not_an_object")
    named = {"name": name, "arguments": arguments}
    return {"id": "" if call_id is None else str(call_id), "type": "function", "function": named}


def _text(source: Mapping[str, Any], field: str) -> str:
    value = source.get(field)
    if not isinstance(value, str | None):
        raise _MalformedError(f"{field!r} is a {type(value).__name__} where text is needed")
    return value or ""


def _one_line(text: str) -> str:
    line = " ".join(text.encode(errors="replace").decode().split())
    return line if len(line) <= 200 else line[:199] + "…"


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
