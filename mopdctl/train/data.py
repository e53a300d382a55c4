"""Rows of prompts and conversations, and conversations as token ids with a loss mask."""

import difflib
import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from jinja2 import TemplateError

from mopdctl.config.sft import LossOn
from mopdctl.errors import InputError
from mopdctl.train.rows import Row, iterate_rows
from mopdctl.train.spans import ChatModel, Messages, check_control_tokens, spans_by_prefix, spans_by_tags

LOSS_ON = get_args(LossOn)


def read_rows(path: Path) -> list[tuple[str, Row]]:
    """All rows of a JSONL or Parquet file, each with its place (`file:line` or `file row N`) for error messages.

    Raises InputError if the file is missing, unreadable or empty.
    """
    rows = list(iterate_rows(path))
    if not rows:
        raise InputError(f"{path}: holds no rows; give at least one")
    return rows


# Those that chat templates of the field know. Many write any role as it is, so that a typo would be trained on.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")


def row_messages(row: Row, place: str, *, key: str = "prompt") -> Messages:
    """The `messages` of a row, or its plain `prompt` as one user message. Raises InputError where neither is usable.

    What data sets store in one fixed form becomes what chat templates take: arguments of a tool call that are a JSON
    object in a string become a mapping (any other string stays as it is), and absent text beside tool calls is "".
    """
    if "messages" in row:
        messages = row["messages"]
    elif key in row:
        messages = [{"role": "user", "content": row[key]}]
    else:
        raise InputError(f"{place}: has neither 'messages' nor '{key}'")
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{place}: 'messages' must be a list with at least one message")
    return [_message(message, f"{place}: message {number}") for number, message in enumerate(messages)]


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InputError(f"{place} has no 'role'")
    if (role := message["role"]) not in _ROLES:
        near = difflib.get_close_matches(role, _ROLES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known roles: {', '.join(_ROLES)}"
        raise InputError(f"{place} has the unknown role {role!r}; {hint}")
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(content, str) and not calls:
        raise InputError(f"{place} has no text in 'content'")
    try:
        str(content).encode()
    except UnicodeEncodeError:
        raise InputError(f"{place} holds half a character (a lone surrogate)") from None
    found = {key: value for key, value in message.items() if value is not None}
    if calls:
        found["content"] = "" if content is None else content
        found["tool_calls"] = [_call(call) for call in calls] if isinstance(calls, list) else calls
    return found


def _call(call: Any) -> Any:
    """A tool call with its arguments as a mapping where they are one, written as JSON or not."""
    if not isinstance(call, dict) or not isinstance(function := call.get("function", call), dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str) and isinstance(found := _parsed(arguments), dict):
        function = function | {"arguments": found}
    return call | {"function": function} if "function" in call else function


def _parsed(text: str) -> Any:
    """The JSON document in `text`, None if there is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def row_tools(row: Row, place: str) -> list[dict[str, Any]] | None:
    """The `tools` of a row, a list or the JSON of one; None if it has none.

    Raises InputError if they are no list of named functions.
    """
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{place}: 'tools' is not JSON ({error})") from None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise InputError(f"{place}: 'tools' must be a list of functions")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InputError(f"{place}: 'tools' entry {number} has no 'function' with a 'name'")
    return tools


def row_conversation(row: Row, place: str) -> Messages:
    """The messages of a row to train on.

    Raises InputError if the assistant says nothing in it, or calls a tool with arguments that are no JSON object: a
    template would fail on them or write them in a way that no model should learn.
    """
    messages = row_messages(row, place)
    if not any(m["role"] == "assistant" for m in messages):
        raise InputError(f"{place}: no assistant message to train on")
    for number, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            function = call.get("function", call) if isinstance(call, dict) else None
            arguments = function.get("arguments", {}) if isinstance(function, dict) else None
            if not isinstance(arguments, dict):
                raise InputError(
                    f"{place}: message {number} calls a tool with arguments that are no JSON object "
                    f"({json.dumps(arguments)[:40]}); drop the row or repair the call"
                )
    return messages


def row_loss_on(row: Row, place: str, default: str) -> str:
    """What a row is trained on: its own `loss_on`, else the default. Raises InputError for an unknown word."""
    found = row.get("loss_on") or default
    if found not in LOSS_ON:
        raise InputError(f"{place}: loss_on {found!r}; use one of {', '.join(LOSS_ON)}")
    return str(found)


@contextmanager
def template_errors(place: str) -> Iterator[None]:
    """Turns what a chat template or tokenizer raises on unusual messages into an InputError that names the row."""
    try:
        yield
    except InputError:
        raise
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{place}: the chat template does not take it ({reason})") from None


def prompt_token_ids(
    model: ChatModel, messages: Sequence[dict[str, Any]], tools: Any, kwargs: dict[str, Any], *, place: str = "prompt"
) -> list[int]:
    """Token ids of a conversation up to where the assistant begins to write."""
    _check_template(model)
    with template_errors(place):
        found = model.tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=True, add_generation_prompt=True, return_dict=True, **kwargs
        )
    return list(found["input_ids"])


def _check_template(model: ChatModel) -> None:
    if model.tokenizer.chat_template is None:
        raise InputError(f"{model.tokenizer.name_or_path}: the tokenizer has no chat template")


def conversation_ids(
    model: ChatModel, messages: Sequence[dict[str, Any]], tools: Any, *, place: str, loss_on: str
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation and a mask of the tokens to train on.

    What the assistant wrote comes from the chat template's `{% generation %}` tags; for a template without them, from
    rendering the conversation up to each assistant turn and checking that the longer text begins with the shorter one.
    In both, a token trains if it begins inside, and what the template itself writes before the assistant does (the
    generation prompt, with an empty think block if it has one) trains nothing.

    Args:
        model: Whose tokenizer and end tokens are used.
        messages: As from `row_conversation`.
        tools: As from `row_tools`.
        place: Where the row is, for error messages.
        loss_on: `assistant`, `last_assistant` (its last message only) or `all` (every token but the first).

    Raises:
        InputError: No assistant message, text that would become control tokens, a template that does not take the
            conversation, or one whose mask is unknown.
    """
    if not any(m["role"] == "assistant" for m in messages):
        raise InputError(f"{place}: no assistant message to train on")
    _check_template(model)
    check_control_tokens(model, messages, tools, place)
    with template_errors(place):
        template = model.tokenizer.get_chat_template(tools=tools)  # one of several, where the tokenizer has several
        spans_of = spans_by_tags if re.search(r"{%[-+]?\s*generation\b", template) else spans_by_prefix
        text, spans = spans_of(model, list(messages), tools, place, loss_on)
        # Tokenized in one piece: tokenizers that mark the beginning of a text would mark every piece.
        found = model.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = list(found["input_ids"])
    if loss_on == "all":
        return ids, [0] + [1] * (len(ids) - 1)
    mask = [0] * len(ids)
    starts = [start for start, _ in found["offset_mapping"]]
    for begin, end in spans:
        first, last = bisect_left(starts, begin), bisect_left(starts, end)
        mask[first:last] = [1] * (last - first)
        if spans_of is spans_by_prefix:
            mask[first:last] = _up_to_end_token(ids[first:last], model.eos_ids)
    return ids, mask


def _up_to_end_token(ids: list[int], eos_ids: frozenset[int]) -> list[int]:
    """1 up to the first end token, 0 for what a template adds after it (a line break, say)."""
    end = next((i + 1 for i, token in enumerate(ids) if token in eos_ids), len(ids))
    return [1] * end + [0] * (len(ids) - end)
