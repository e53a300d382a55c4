"""OpenAI chat messages: the one normal form that trajectories use, and the importer of rows of them.

The importer takes JSONL and Parquet rows `{"messages", "tools"?, "id"?, "domain"?, "reward"?, "environment"?}`, with
`messages` and `tools` as lists or as their JSON text, and documents of mini-swe-agent 1.1, which are the same with an
`info` and an `extra` in each message.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from mopdctl.pivots.audit import Note, Reason, UnusableError
from mopdctl.pivots.trajectory import Step, Trajectory
from mopdctl.records import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = {"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"}
_REASONING = ("reasoning_content", "reasoning", "thinking")  # DeepSeek and older vLLM; newer vLLM, OpenRouter; Harmony
_READ = {
    "function_call", "finish_reason", "stop_reason", "error", "is_error", "refusal", "is_copied_context",
    "copied_context", "compaction", "is_compact_summary", *_REASONING,
}  # fmt: skip
_CUT = {"length", "max_tokens", "max_output_tokens", "model_context_window_exceeded"}
_ROLES_READ = {"function": "tool"}  # of the API before tools


def import_chat(row: dict[str, Any], place: str) -> Iterator[Trajectory]:
    """The trajectory in a row. Raises UnusableError.

    Fields of a message that are not part of a conversation are noted and left out; columns of the row that are not
    named above are the user's own and left alone.
    """
    raw = json_value(row["messages"], "messages")
    if not isinstance(raw, list) or not raw:
        raise UnusableError(Reason.MALFORMED, "'messages' must be a list with at least one message")
    trajectory_id = row_id(row, "trajectory_id", "id", "instance_id") or place
    dropped: Counter[str] = Counter()
    steps: list[Step] = []
    broken = False
    for number, message in enumerate(raw):
        if isinstance(message, dict) and message.get("role") == "exit" and number == len(raw) - 1:
            dropped["role 'exit'"] += 1  # how mini-swe-agent ends its log
            continue
        normal, extra = normal_message(message, f"message {number}")
        dropped.update(extra)
        broken = broken or any(message.get(key) for key in ("compaction", "is_compact_summary"))
        steps.append(_step(message, normal, broken))
    notes = [Note(trajectory_id, "extra_field", place, f"{name} of a message ({n})") for name, n in dropped.items()]
    yield Trajectory(
        trajectory_id=trajectory_id,
        steps=tuple(steps),
        tools=chat_tools(row.get("tools")),
        domain=row["domain"] if isinstance(row.get("domain"), str) else "",
        reward=reward_of(row.get("reward")),
        environment=_environment(row.get("environment")),
        source=place,
        notes=tuple(notes),
    )


def normal_message(message: Any, where: str) -> tuple[Message, list[str]]:
    """A chat message in one spelling, and the names of the fields that went missing over it.

    All spellings that become one mean the same to an API or a chat template. Absent text is `""`, an assistant's one
    text part is its text, reasoning is `reasoning_content`, a call is `{"id", "type", "function"}` with an id that is
    text (`""` if there was none) and its arguments as JSON text, verbatim where they were text. Other content parts
    stay as they are. Raises UnusableError.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UnusableError(Reason.MALFORMED, f"{where} has no 'role'")
    role = _ROLES_READ.get(message["role"], message["role"])
    if role not in ROLES:
        raise UnusableError(Reason.MALFORMED, f"{where} has the unknown role {role!r}")
    normal: Message = {"role": role, "content": normal_content(message.get("content"), role, where)}
    extra = [key for key, value in message.items() if key not in _FIELDS | _READ and value is not None]
    if isinstance(message.get("name"), str) and message["name"]:
        normal["name"] = message["name"]
    if role == "tool" and message.get("tool_call_id") not in (None, ""):
        normal["tool_call_id"] = _id(message["tool_call_id"], where)
    if role != "assistant":
        return normal, extra + [key for key in ("tool_calls", *_REASONING) if message.get(key)]
    if reasoning := next((text for key in _REASONING if (text := message.get(key))), ""):
        if not isinstance(reasoning, str):
            raise UnusableError(Reason.MALFORMED, f"{where} has no text as its reasoning")
        normal["reasoning_content"] = reasoning
    legacy = message.get("function_call")
    if calls := message.get("tool_calls") or ([{"function": legacy}] if legacy else None):
        if not isinstance(calls, list):
            raise UnusableError(Reason.MALFORMED, f"{where}: 'tool_calls' must be a list")
        normal["tool_calls"] = []
        for index, call in enumerate(calls):
            found, more = _call(call, f"{where}: tool call {index}")
            normal["tool_calls"].append(found)
            extra += more
    return normal, extra


def normal_content(content: Any, role: str, where: str) -> str | list[dict[str, Any]]:
    """The content of a message: text, or a list of parts. Raises UnusableError."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(
        isinstance(p, dict) and isinstance(p.get("type"), str) for p in content
    ):
        raise UnusableError(Reason.MALFORMED, f"{where} has neither text nor a list of parts as 'content'")
    if role == "assistant" and len(content) < 2:
        if not content:
            return ""
        if is_plain_text(content[0]):
            return str(content[0]["text"])
    return content


def is_plain_text(part: dict[str, Any]) -> bool:
    """Whether a content part is text and nothing more."""
    return part.keys() == {"type", "text"} and part["type"] == "text" and isinstance(part["text"], str)


def text_of(content: str | list[dict[str, Any]]) -> str:
    """The text in a message's content, that of its parts joined."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text" and isinstance(part.get("text"), str))


def _call(call: Any, where: str) -> tuple[dict[str, Any], list[str]]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise UnusableError(Reason.MALFORMED, f"{where} has no function with a name")
    arguments = function.get("arguments")
    found = {
        "id": _id(call["id"], where) if call.get("id") is not None else "",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments_text(arguments)},
    }
    known = {"id", "type", "function", "name", "arguments"}
    return found, [f"tool_calls.{key}" for key in {**call, **function} if key not in known]


def arguments_text(arguments: Any) -> str:
    """Arguments as the JSON text that the wire carries: verbatim if they are text, else written out."""
    if isinstance(arguments, str):
        return arguments
    return "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)


def _step(raw: dict[str, Any], message: Message, broken: bool) -> Step:
    if message["role"] != "assistant":
        return Step(message)
    if raw.get("is_copied_context") or raw.get("copied_context"):
        return Step(message, Reason.COPIED_CONTEXT)
    if broken:
        return Step(message, Reason.AFTER_COMPACTION)
    finish = finish_reason(raw)
    if raw.get("error") or raw.get("is_error") or finish in ("error", "content_filter"):
        return Step(message, Reason.ERRORED, str(raw.get("error") or finish or "error")[:200])
    if finish in _CUT:
        return Step(message, Reason.UNFINISHED, f"finish_reason {finish}")
    if raw.get("refusal") or refuses(message):
        return Step(message, Reason.REFUSAL)
    return Step(message)


def refuses(message: Message) -> bool:
    """Whether a part of an assistant message is a refusal."""
    return isinstance(message["content"], list) and any(part["type"] == "refusal" for part in message["content"])


def finish_reason(raw: dict[str, Any]) -> str:
    """Why a model stopped, as a message or its log entry says; empty if neither does."""
    for holder in (raw, raw.get("extra"), _first_choice(raw.get("extra"))):
        if isinstance(holder, dict):
            for key in ("finish_reason", "stop_reason"):
                if isinstance(holder.get(key), str):
                    return str(holder[key])
    return ""


def _first_choice(extra: Any) -> Any:
    response = extra.get("response") if isinstance(extra, dict) else None
    choices = response.get("choices") if isinstance(response, dict) else None
    return choices[0] if isinstance(choices, list) and choices else None


def is_cut(finish: str) -> bool:
    """Whether a finish reason says that a limit was met."""
    return finish in _CUT


def chat_tools(value: Any) -> tuple[dict[str, Any], ...] | None:
    """Tools as OpenAI function schemas; None if there are none.

    Takes a list or its JSON text, of chat tools (kept as they are), Responses tools or bare functions. Raises
    UnusableError, for a tool that a server runs by itself too.
    """
    tools = json_value(value, "tools")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise UnusableError(Reason.MALFORMED, "'tools' must be a list of functions")
    return tuple(_tool(tool, number) for number, tool in enumerate(tools))


def _tool(tool: Any, number: int) -> dict[str, Any]:
    if isinstance(tool, dict) and tool.get("type", "function") == "function":
        function = tool.get("function")
        if function is None:
            function = {key: value for key, value in tool.items() if key != "type"}
            tool = {"type": "function", "function": function}
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return dict(tool)
    kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
    raise UnusableError(Reason.MALFORMED, f"tool {number} is no function with a name (type {kind!r})")


def json_value(value: Any, name: str) -> Any:
    """A value of a table that may be stored as its JSON text. Raises UnusableError if that does not parse."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UnusableError(Reason.MALFORMED, f"{name!r} is not JSON ({error})") from None


def row_id(row: dict[str, Any], *keys: str) -> str:
    """The first of some fields that holds an id, as text; empty if none does."""
    for key in keys:
        if isinstance(value := row.get(key), str | int) and not isinstance(value, bool) and value != "":
            return str(value)
    return ""


def reward_of(value: Any) -> float | None:
    """A number as a float; None for anything else and for NaN, a table's word for nothing.

    Raises UnusableError for one that is infinite or beyond a double.
    """
    if not isinstance(value, int | float):
        return None
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if math.isinf(reward):
        raise UnusableError(Reason.MALFORMED, "'reward' is beyond every number")
    return None if math.isnan(reward) else reward


def _environment(value: Any) -> dict[str, Any] | None:
    environment = json_value(value, "environment")
    if not isinstance(environment, dict | None):
        raise UnusableError(Reason.MALFORMED, "'environment' must be an object")
    return environment


def _id(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UnusableError(Reason.MALFORMED, f"{where} has an id that is a {type(value).__name__}")
    return str(value)
