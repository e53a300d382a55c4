"""Rows of prompts and conversations from JSONL or Parquet, and conversations as token ids with a loss mask."""

import difflib
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from mopdctl.errors import InputError
from mopdctl.files import read_jsonl

if TYPE_CHECKING:  # rows are read without torch too
    from mopdctl.engines.hf import HFModel

Row = dict[str, Any]


def read_rows(path: Path) -> list[tuple[str, Row]]:
    """All rows of a JSONL or Parquet file, each with its place (`file:line` or `file row N`) for error messages.

    Raises InputError if the file is missing, unreadable or empty.
    """
    rows = list(_parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path))
    if not rows:
        raise InputError(f"{path}: holds no rows; give at least one")
    return rows


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Row]]:
    for number, row in read_jsonl(path):
        yield f"{path}:{number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.exists():
        raise InputError(f"{path}: no such file; check the path")
    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise InputError(f"{path}: not Parquet ({str(error).splitlines()[0]})") from None
    for number, row in enumerate(table.to_pylist()):
        found = {key: value for key, value in row.items() if value is not None}
        yield f"{path} row {number}", found | {key: _present(found[key]) for key in _OPEN & found.keys()}


# Columns whose objects may have keys of their own. Parquet gives every row the keys of all rows and fills them with
# null, which a template would print. Elsewhere, in a reference say, a null may be meant.
_OPEN = {"messages", "tools"}


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    return [_present(item) for item in value] if isinstance(value, list) else value


# Those that chat templates of the field know. Many write any role as it is, so that a typo would be trained on.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")


def row_messages(row: Row, place: str, *, key: str = "prompt") -> list[dict[str, Any]]:
    """The `messages` of a row, or its plain `prompt` as one user message. Raises InputError where neither is usable."""
    if "messages" in row:
        messages = row["messages"]
    elif key in row:
        messages = [{"role": "user", "content": row[key]}]
    else:
        raise InputError(f"{place}: has neither 'messages' nor '{key}'")
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{place}: 'messages' must be a list with at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(f"{place}: message {number} has no 'role'")
        if (role := message["role"]) not in _ROLES:
            near = difflib.get_close_matches(role, _ROLES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known roles: {', '.join(_ROLES)}"
            raise InputError(f"{place}: message {number} has the unknown role {role!r}; {hint}")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise InputError(f"{place}: message {number} has no text in 'content'")
        try:
            str(message.get("content")).encode()
        except UnicodeEncodeError:
            raise InputError(f"{place}: message {number} holds half a character (a lone surrogate)") from None
    return [{k: v for k, v in message.items() if v is not None} for message in messages]


def row_tools(row: Row, place: str) -> list[dict[str, Any]] | None:
    """The `tools` of a row, None if it has none. Raises InputError if they are no list of named functions."""
    tools = row.get("tools")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise InputError(f"{place}: 'tools' must be a list of functions")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InputError(f"{place}: 'tools' entry {number} has no 'function' with a 'name'")
    return tools


def row_conversation(row: Row, place: str) -> list[dict[str, Any]]:
    """The messages of a row to train on. Raises InputError if the assistant says nothing in it."""
    messages = row_messages(row, place)
    if not any(m["role"] == "assistant" for m in messages):
        raise InputError(f"{place}: no assistant message to train on")
    return messages


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


def conversation_ids(
    model: "HFModel", messages: Sequence[dict[str, Any]], tools: Any, *, place: str, loss_on: str
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation and a mask of the tokens to train on.

    The mask comes from the chat template's `{% generation %}` tags; for a template without them, from rendering the
    conversation up to each assistant turn and checking that the longer text begins with the shorter one.
    """
    if not any(m["role"] == "assistant" for m in messages):
        raise InputError(f"{place}: no assistant message to train on")
    if model.tokenizer.chat_template is None:
        raise InputError(f"{model.model.name_or_path}: the tokenizer has no chat template")
    with template_errors(place):
        ids, mask = _conversation(model, messages, tools, place)
    if loss_on == "all":
        mask = [0] + [1] * (len(ids) - 1)
    return ids, mask


def _conversation(
    model: "HFModel", messages: Sequence[dict[str, Any]], tools: Any, place: str
) -> tuple[list[int], list[int]]:
    template = model.tokenizer.get_chat_template(tools=tools)  # one of several, where the tokenizer has several
    if re.search(r"{%[-+]?\s*generation\b", template):
        found = model.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(found["input_ids"]), list(found["assistant_masks"])
    return _mask_by_prefix(model, messages, tools, place)


def prompt_token_ids(
    model: "HFModel", messages: Sequence[dict[str, Any]], tools: Any, kwargs: dict[str, Any], *, place: str = "prompt"
) -> list[int]:
    """Token ids of a conversation up to where the assistant begins to write."""
    if model.tokenizer.chat_template is None:
        raise InputError(f"{model.model.name_or_path}: the tokenizer has no chat template")
    with template_errors(place):
        found = model.tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=True, add_generation_prompt=True, return_dict=True, **kwargs
        )
    return list(found["input_ids"])


def _mask_by_prefix(
    model: "HFModel", messages: Sequence[dict[str, Any]], tools: Any, place: str
) -> tuple[list[int], list[int]]:
    def render(part: Sequence[dict[str, Any]], prompt: bool) -> str:
        text = model.tokenizer.apply_chat_template(
            list(part), tools=tools, tokenize=False, add_generation_prompt=prompt
        )
        return str(text)

    text = ""
    answers: list[tuple[int, int]] = []
    for end, message in enumerate(messages, start=1):
        if message["role"] != "assistant":
            continue
        before = render(messages[: end - 1], True) if end > 1 else ""
        after = render(messages[:end], False)
        if not before or not before.startswith(text) or not after.startswith(before):
            raise InputError(
                f"{place}: the chat template rewrites earlier turns or the assistant speaks first, so the loss mask is "
                "unknown; use a template with {% generation %} tags"
            )
        answers.append((len(before), len(after)))
        text = after
    # Tokenized in one piece: tokenizers that mark the beginning of a text would mark every piece.
    found = model.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = list(found["input_ids"])
    mask = [0] * len(ids)
    starts = [start for start, _ in found["offset_mapping"]]
    for begin, end in answers:
        first, last = bisect_left(starts, begin), bisect_left(starts, end)
        mask[first:last] = _up_to_end_token(ids[first:last], model.eos_ids)
    return ids, mask


def _up_to_end_token(ids: list[int], eos_ids: frozenset[int]) -> list[int]:
    """1 up to the first end token, 0 for what a template adds after it (a line break, say)."""
    end = next((i + 1 for i, token in enumerate(ids) if token in eos_ids), len(ids))
    return [1] * end + [0] * (len(ids) - end)
