"""From one row, as it was found, to a seed; or the reason why it is none."""

import datetime
import decimal
import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopdctl.config.gensft import SeedSource
from mopdctl.errors import InputError
from mopdctl.gensft.answers import is_json_object
from mopdctl.gensft.records import Message, Seed
from mopdctl.train.data import row_messages, row_tools
from mopdctl.train.rows import Row

_QUOTED_CHARS = 500
# A null in one of these is no value; elsewhere it may be meant.
_FIELDS = {"messages", "tools", "domain", "source", "license", "difficulty", "reference", "verifier", "id"}

# System messages first, then user and assistant in turn, each assistant perhaps after some calls and their results.
_EVEN = re.compile(r"s*(?:u(?:at+)*a)*u(?:at+)*")
_LETTERS = {"system": "s", "developer": "s", "user": "u", "assistant": "a"}


class UnusableRowError(ValueError):
    """The row cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class FoundRow:
    """A row with its place."""

    file: str
    """File or data set."""
    number: int
    """Line from 1 in JSONL, else row from 0."""
    byte_offset: int | None
    """Where the line begins; None in what has no lines."""
    raw: bytes | Row
    problem: str = ""
    """Why it could not even be taken out of its file."""

    @property
    def place(self) -> str:
        """`file:line` or `file row N`."""
        return f"{self.file} row {self.number}" if self.byte_offset is None else f"{self.file}:{self.number}"

    def quarantined(self, reason: str) -> dict[str, Any]:
        """The row as an entry of the quarantine."""
        if isinstance(self.raw, bytes):
            text = self.raw[: 4 * _QUOTED_CHARS].decode(errors="replace")  # a character has up to four bytes
        else:
            text = str(self.raw).encode(errors="replace").decode()
        where = {"file": self.file, "line": self.number, "byte_offset": self.byte_offset}
        return where | {"reason": reason, "text": text[:_QUOTED_CHARS]}


def row_seed(found: FoundRow, source: SeedSource, notes: Counter[str]) -> Seed:
    """The seed in a row, its id still empty. Raises UnusableRowError.

    `notes` counts what was unusual in a usable row; see `read_seeds`.
    """
    noted: Counter[str] = Counter()
    try:
        row = _json_row(found)
        messages = _messages(row, found.place, source.prompt_field, noted)
        tools = _tools(row, found.place)
        # What the source says goes over the row's own field, which then stays among the others.
        domain = source.domain or _take_text(row, "domain")
        name = source.source or _take_text(row, "source")
        license_name = source.license or _take_text(row, "license")
        verifier, difficulty, reference = _take_text(row, "verifier"), _difficulty(row), row.pop("reference", None)
        if "id" in row:
            row["id"] = _id(row["id"], "id")
        if not domain:
            raise UnusableRowError("no domain")
    except InputError as error:
        raise UnusableRowError(str(error).removeprefix(f"{found.place}: ")) from None
    except RecursionError:
        raise UnusableRowError("nested too deep") from None
    notes.update(noted)
    return Seed(
        seed_id="",
        messages=messages,
        tools=tools,
        domain=domain,
        source=name or (Path(found.file).name if source.path else found.file),
        license=license_name,
        difficulty=difficulty,
        reference=reference,
        verifier=verifier,
        extra=row or None,
        place=found.place,
    )


def _json_row(found: FoundRow) -> Row:
    """The row as JSON values."""
    if found.problem:
        raise UnusableRowError(found.problem)
    if isinstance(found.raw, bytes):
        row = _parsed_line(found.raw)
    else:
        row = {key: _json_ready(value, key) for key, value in found.raw.items()}
    return {key: value for key, value in row.items() if value is not None or key not in _FIELDS}


def _parsed_line(line: bytes) -> Row:
    torn = "" if line.endswith(b"\n") else "torn last line: "
    try:
        row = _loads(line.decode().rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise UnusableRowError(f"{torn}not UTF-8 at byte {error.start} of the line") from None
    except UnusableRowError as error:
        raise UnusableRowError(f"{torn}{error}") from None
    if not isinstance(row, dict):
        raise UnusableRowError(f"a {type(row).__name__} where a JSON object is needed")
    return row


def _loads(text: str) -> Any:
    """Strict JSON: no duplicate key, no NaN, no number beyond a float, no half characters."""
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse, parse_float=_finite)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise UnusableRowError(f"not JSON ({error.msg.removesuffix(' at')} at column {error.colno})") from None
    except UnicodeEncodeError:
        raise UnusableRowError("holds half a character (a lone surrogate)") from None
    except (ValueError, RecursionError) as error:
        raise UnusableRowError(f"not JSON ({error})") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {twice!r} stands twice")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is beyond a float")
    return value


def _json_ready(value: Any, field: str) -> Any:
    """A value of a table as JSON has it: dates and times as ISO text, decimals as text."""
    match value:
        case None | str() | bool() | int():
            return value
        case float() if math.isfinite(value):
            return value
        case float():
            raise UnusableRowError(f"field {field!r} holds {value}, which is no JSON number")
        case dict() if all(isinstance(key, str) for key in value):
            return {key: _json_ready(item, field) for key, item in value.items()}
        case list() | tuple():
            return [_json_ready(item, field) for item in value]
        case datetime.date() | datetime.time():  # a datetime is a date
            return value.isoformat()
        case decimal.Decimal():
            return str(value)
    raise UnusableRowError(f"field {field!r} holds {type(value).__name__}, which JSON cannot; drop or convert it")


def _messages(row: Row, place: str, prompt_field: str, notes: Counter[str]) -> tuple[Message, ...]:
    """Takes the conversation out of a row, up to where the assistant is to speak."""
    row_messages(row, place, key=prompt_field)  # for its checks: it also rewrites arguments, which stay verbatim here
    found = row.pop("messages") if "messages" in row else [{"role": "user", "content": row.pop(prompt_field)}]
    end = len(found)
    while end and found[end - 1]["role"] == "assistant":
        end -= 1
    messages = tuple(_message(message, f"message {number}", notes) for number, message in enumerate(found[:end]))
    roles = "".join(_LETTERS.get(message["role"], "t") for message in messages)
    if not set(roles) & {"u", "t"}:
        raise UnusableRowError("nobody asks anything: no user message before the assistant's last turn")
    notes["answers_cut"] += end < len(found)
    notes["uneven_roles"] += not _EVEN.fullmatch(roles)
    return messages


def _message(message: Message, where: str, notes: Counter[str]) -> Message:
    """A message with text as content, ids as text, and tool call arguments as JSON text."""
    found = {"role": message["role"], "content": ""} | {k: v for k, v in message.items() if v is not None}
    if not isinstance(found["content"], str):
        raise UnusableRowError(f"{where} has no text in 'content'")
    for field in ("reasoning_content", "name"):
        if not isinstance(found.get(field, ""), str):
            raise UnusableRowError(f"{where} has no text in {field!r}")
    if "tool_call_id" in found:
        found["tool_call_id"] = _id(found["tool_call_id"], f"{where}: tool_call_id")
    if calls := found.pop("tool_calls", None):
        if not isinstance(calls, list):
            raise UnusableRowError(f"{where}: 'tool_calls' must be a list")
        found["tool_calls"] = [_call(call, f"{where}: tool call {i}", notes) for i, call in enumerate(calls)]
    return found


def _call(call: Any, where: str, notes: Counter[str]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise UnusableRowError(f"{where} has no function with a name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    notes["arguments_not_an_object"] += not is_json_object(arguments)
    call_id = "" if call.get("id") is None else _id(call["id"], f"{where}: id")
    named: dict[str, Any] = {"name": function["name"], "arguments": arguments}
    return {"id": call_id, "type": "function", "function": named}


def _tools(row: Row, place: str) -> tuple[dict[str, Any], ...] | None:
    """Takes the tools out of a row, a list or its JSON text; an empty list is None."""
    value = row.pop("tools", None)
    if isinstance(value, str):
        try:
            value = _loads(value) if value.strip() else None
        except UnusableRowError as error:
            raise UnusableRowError(f"'tools': {error}") from None
    tools = row_tools({"tools": value}, place)
    return tuple(tools) if tools else None


def _take_text(row: Row, field: str) -> str | None:
    value = row.pop(field, None)
    if not isinstance(value, str | None):
        raise UnusableRowError(f"{field!r} is a {type(value).__name__} where text is needed")
    return value or None


def _difficulty(row: Row) -> float | None:
    value = row.pop("difficulty", None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UnusableRowError(f"'difficulty' is {value!r}; a number from 0 to 1 is needed")
    return float(value)


def _id(value: Any, where: str) -> str:
    """Ids are text: 1 and "1" are the same."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UnusableRowError(f"{where} is a {type(value).__name__}; text or a whole number is needed")
    return str(value)
