"""Chat messages to OpenAI Responses items and back, without loss: what the other form cannot hold is refused by name.

One assistant message is the items of one model call, in this order: reasoning, then text, then function calls.

| chat (normal form of `chat.normal_message`) | Responses item |
|---|---|
| `reasoning_content` | `reasoning`, one `summary_text` |
| assistant text | `message` with `output_text`; none where the text is empty beside calls |
| `tool_calls[i]` | `function_call` (`call_id`, `name`, `arguments` verbatim) |
| `tool` message | `function_call_output` |
| other messages | `message` |

Items say more than messages can: ids of their own, statuses, annotations, encrypted reasoning, several
reasoning items of one model call. Where they do, the message keeps its items under `responses_items`, and going back
takes them from there; a message that was edited since is refused. Source: the item types of the `openai` package,
`openai/types/responses`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from mopdctl.errors import InputError
from mopdctl.pivots.audit import UnusableError
from mopdctl.pivots.chat import is_plain_text, normal_message
from mopdctl.records import Message

Item = dict[str, Any]

KEPT = "responses_items"
"""Key of a chat message under which it keeps the items that it was made of, where it alone would not give them."""
OUTPUT_TYPES = ("reasoning", "message", "function_call")
"""What a model writes. A `message` only if it is the assistant's."""


class ConversionError(InputError):
    """The other form cannot hold this. The message says what and where."""


def chat_to_responses(messages: Sequence[Message]) -> list[Item]:
    """The items of a conversation. `responses_to_chat` gives back exactly `messages`.

    Raises ConversionError for a message that is not in normal form, a call or result without an id, a `name` outside a
    tool message, any unknown field, and an assistant message that would join the one before it.
    """
    items: list[Item] = []
    sizes: list[int] = []
    for number, message in enumerate(messages):
        made = _message_items(message, len(items), f"message {number}")
        items += made
        sizes.append(len(made))
    if [len(group) for group in grouped(items)] != sizes:
        raise ConversionError(f"message {_joined(items, sizes)}: an assistant message of calls alone would join the "
                              "assistant message before it; put their result, or text, between them")  # fmt: skip
    return items


def responses_to_chat(items: Sequence[Item]) -> list[Message]:
    """The chat messages of items. `chat_to_responses` gives back exactly `items`.

    Raises ConversionError for an item type that chat has no word for, and for a malformed item.
    """
    messages: list[Message] = []
    at = 0
    for group in grouped(items):
        message = message_of(group, f"item {at}")
        if _plain_items(message, at) != group:
            message = message | {KEPT: [dict(item) for item in group]}
        messages.append(message)
        at += len(group)
    return messages


def without_items(message: Message) -> Message:
    """A message without the items that it keeps."""
    return {key: value for key, value in message.items() if key != KEPT}


def grouped(items: Sequence[Item]) -> Iterator[list[Item]]:
    """The items of each message: those of one model call together, every other item alone.

    A model call ends where an item that no model writes follows, at text or reasoning after a call, and at text or
    reasoning after text: a flat list does not say more.
    """
    group: list[Item] = []
    rank = -1
    for item in items:
        own = OUTPUT_TYPES.index(item_type(item)) if is_output(item) else -1
        # A second text begins another message, a second reasoning or call does not.
        if group and (own < 0 or rank < 0 or own < rank or own == rank == 1):
            yield group
            group = []
        group.append(item)
        rank = own
    if group:
        yield group


def item_type(item: Item) -> str:
    """The type of an item; a message may leave it out."""
    kind = item.get("type") if isinstance(item, dict) else None
    return str(kind) if kind else "message"


def is_output(item: Item) -> bool:
    """Whether a model wrote this item."""
    kind = item_type(item)
    return kind in ("reasoning", "function_call") or (
        kind == "message" and isinstance(item, dict) and item.get("role") == "assistant"
    )


def message_of(group: Sequence[Item], where: str) -> Message:
    """The chat message of the items of one group, in normal form. Raises ConversionError."""
    first = group[0]
    if not isinstance(first, dict):
        raise ConversionError(f"{where}: a {type(first).__name__} where an item is needed")
    if not is_output(first):
        return _input_message(first, where)
    texts: list[str] = []
    message: Message = {"role": "assistant", "content": ""}
    calls = []
    for item in group:
        kind = item_type(item)
        if kind == "reasoning":
            texts.append(reasoning_text(item, where))
        elif kind == "message":
            message["content"] = _chat_content(item.get("content"), "assistant", where)
        else:
            for key in ("call_id", "name", "arguments"):
                if not isinstance(item.get(key), str):
                    raise ConversionError(f"{where}: a function_call without text in {key!r}")
            function = {"name": item["name"], "arguments": item["arguments"]}
            calls.append({"id": item["call_id"], "type": "function", "function": function})
    if reasoning := "\n\n".join(text for text in texts if text):
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def reasoning_text(item: Item, where: str) -> str:
    """What a reasoning item lets one read: its content, else its summary; empty if it is encrypted."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        raise ConversionError(f"{where}: a reasoning item whose parts have no text")
    return "\n\n".join(part["text"] for part in parts)


def _input_message(item: Item, where: str) -> Message:
    kind = item_type(item)
    if kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise ConversionError(f"{where}: a function_call_output without text in 'call_id'")
        found = {"role": "tool", "content": _chat_content(item.get("output"), "tool", where)}
        if isinstance(item.get("name"), str) and item["name"]:
            found["name"] = item["name"]
        return found | {"tool_call_id": item["call_id"]}
    if kind != "message":
        raise ConversionError(f"{where}: chat messages have no form for an item of type {kind!r}")
    role = item.get("role")
    if role not in ("system", "developer", "user"):
        raise ConversionError(f"{where}: a message of the unknown role {role!r}")
    return {"role": role, "content": _chat_content(item.get("content"), role, where)}


def _message_items(message: Message, at: int, where: str) -> list[Item]:
    if KEPT not in message:
        return _checked_items(message, at, where)
    kept = message[KEPT]
    if not isinstance(kept, list) or len(list(grouped(kept))) != 1 or message_of(kept, where) != without_items(message):
        raise ConversionError(f"{where}: was changed since its {KEPT!r} were kept; take that key out")
    return list(kept)


def _checked_items(message: Message, at: int, where: str) -> list[Item]:
    try:
        normal, extra = normal_message(message, where)
    except UnusableError as error:
        raise ConversionError(str(error)) from None
    if extra:
        raise ConversionError(f"{where}: Responses items have no place for {extra[0]!r}")
    ids = [call["id"] for call in normal.get("tool_calls", ())]
    if normal["role"] == "tool":
        ids = [normal.get("tool_call_id", "")]
    if not all(ids):
        raise ConversionError(f"{where}: a call or a result without an id")
    if "name" in message and normal["role"] != "tool":
        raise ConversionError(f"{where}: Responses items have no place for the 'name' of a {normal['role']} message")
    if normal != message:
        odd = sorted(message.keys() ^ normal.keys()) or sorted(key for key in message if message[key] != normal[key])
        raise ConversionError(f"{where}: {odd[0]!r} is not in the normal form of chat messages")
    items = _plain_items(message, at)
    if message_of(items, where) != message:
        raise ConversionError(f"{where}: holds a content part that would come back as another one")
    return items


def _plain_items(message: Message, at: int) -> list[Item]:
    """The items of a message in normal form, the first of them number `at`, after which those with ids are named."""
    role, content = message["role"], message["content"]
    if role == "tool":
        named = {"name": message["name"]} if "name" in message else {}
        output = content if isinstance(content, str) else [_item_part(part, "input_text") for part in content]
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": output, **named}]
    if role != "assistant":
        parts = content if isinstance(content, str) else [_item_part(part, "input_text") for part in content]
        return [{"type": "message", "role": role, "content": parts}]
    items: list[Item] = []
    if text := message.get("reasoning_content"):
        items.append({"type": "reasoning", "id": f"rs_{at}", "summary": [{"type": "summary_text", "text": text}]})
    calls = message.get("tool_calls", ())
    if content or not calls:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        items.append(
            {
                "type": "message",
                "id": f"msg_{at + len(items)}",
                "role": "assistant",
                "status": "completed",
                "content": [_item_part(part, "output_text") for part in parts],
            }
        )
    for call in calls:
        named = {"call_id": call["id"], "name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        items.append({"type": "function_call", "id": f"fc_{at + len(items)}", **named, "status": "completed"})
    return items


def _item_part(part: dict[str, Any], text_type: str) -> dict[str, Any]:
    if part["type"] == "text":
        return ({"annotations": []} if text_type == "output_text" else {}) | part | {"type": text_type}
    image = part.get("image_url")
    if part["type"] == "image_url" and isinstance(image, dict) and "url" in image and image.keys() <= {"url", "detail"}:
        flat = {"image_url": image["url"]} | {key: image[key] for key in ("detail",) if key in image}
        return part | {"type": "input_image"} | flat
    return part


def _chat_content(content: Any, role: str, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(
        isinstance(p, dict) and isinstance(p.get("type"), str) for p in content
    ):
        raise ConversionError(f"{where}: neither text nor a list of parts as its content")
    parts = [_chat_part(part, role) for part in content]
    if role == "assistant" and len(parts) < 2:
        if not parts:
            return ""
        if is_plain_text(parts[0]):
            return str(parts[0]["text"])
    return parts


def _chat_part(part: dict[str, Any], role: str) -> dict[str, Any]:
    if part["type"] in ("input_text", "output_text"):
        said_by_items = ("annotations", "logprobs") if role == "assistant" else ()
        return {key: value for key, value in part.items() if key not in said_by_items} | {"type": "text"}
    if part["type"] == "input_image" and isinstance(part.get("image_url"), str) and "file_id" not in part:
        flat = {key: value for key, value in part.items() if key not in ("image_url", "detail")}
        image = {"url": part["image_url"]} | {key: part[key] for key in ("detail",) if key in part}
        return flat | {"type": "image_url", "image_url": image}
    return part


def _joined(items: list[Item], sizes: list[int]) -> int:
    """The number of the first message that does not come back alone."""
    found = [len(group) for group in grouped(items)]
    return next(n for n, size in enumerate(sizes) if n >= len(found) or found[n] != size) + 1
