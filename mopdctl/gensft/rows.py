"""A row of the data set: one schema for all, so that no reader has to guess a type.

What has a fixed shape has columns of its own; what has none (tool definitions, arguments, sampling, extra fields) is
JSON text of Parquet's logical type JSON. `datasets` knows the type and gives objects; other readers see the text.
"""

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from mopdctl.config.committee import Member, Route
from mopdctl.files import digest
from mopdctl.gensft.records import Judged, Message, Seed
from mopdctl.gensft.signatures import text_digest

_CALL = pa.struct(
    [
        ("id", pa.string()),
        ("type", pa.string()),
        ("function", pa.struct([("name", pa.string()), ("arguments", pa.json_())])),
    ]
)
MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("reasoning_content", pa.string()),
        ("tool_calls", pa.list_(_CALL)),
        ("tool_call_id", pa.string()),
        ("name", pa.string()),
    ]
)
_FIELDS = tuple(field.name for field in MESSAGE)
_COLUMNS: list[tuple[str, pa.DataType]] = [
    ("id", pa.string()),
    ("messages", pa.list_(MESSAGE)),
    ("tools", pa.json_()),
    ("domain", pa.string()),
    ("source", pa.string()),
    ("license", pa.string()),
    ("difficulty", pa.float64()),
    ("loss_on", pa.string()),
    ("generator", pa.string()),
    ("model", pa.string()),
    ("revision", pa.string()),
    ("engine", pa.string()),
    ("generator_license", pa.string()),
    ("outputs_may_train", pa.bool_()),
    ("sampling", pa.json_()),
    ("sampling_seed", pa.int64()),
    ("finish_reason", pa.string()),
    ("prompt_tokens", pa.int64()),
    ("completion_tokens", pa.int64()),
    ("cost_usd", pa.float64()),
    ("score", pa.float64()),
    ("score_state", pa.string()),
    ("verdicts", pa.json_()),
    ("verifier", pa.string()),
    ("verifier_version", pa.int32()),
    ("verify_state", pa.string()),
    ("reward", pa.float64()),
    ("votes", pa.int32()),
    ("reference_member", pa.string()),
    ("reference_score", pa.float64()),
    ("seed_id", pa.string()),
    ("sample_index", pa.int32()),
    ("request_key", pa.string()),
    ("text_digest", pa.string()),
    ("extra", pa.json_()),
]
SCHEMA = pa.schema(_COLUMNS)


def _as_text(kind: pa.DataType) -> pa.DataType:
    """The type with JSON as plain text: Arrow builds arrays of it, and casts them."""
    if isinstance(kind, pa.JsonType):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _as_text(field.type)) for field in kind])
    return pa.list_(_as_text(kind.value_type)) if pa.types.is_list(kind) else kind


_TEXT_SCHEMA = pa.schema([(name, _as_text(kind)) for name, kind in _COLUMNS])


def table(rows: list[Mapping[str, Any]]) -> pa.Table:
    """Rows as Arrow, in the schema whatever they hold."""
    return pa.Table.from_pylist(rows, schema=_TEXT_SCHEMA).cast(SCHEMA)


def compact(document: Any) -> str:
    """JSON text on one line."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def row_id(seed: Seed, sample_index: int) -> str:
    """The stable name of an answer."""
    return digest(f"{seed.seed_id}/{sample_index}")


def conversation(seed: Seed, answer: Message, route: Route) -> list[Message]:
    """The messages of a row: the seed's, the row's system prompt if it has none of its own, and the answer."""
    messages = [*seed.messages, answer]
    if route.row_system_prompt and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": route.row_system_prompt})
    return [{name: message.get(name) for name in _FIELDS} for message in messages]


def make_row(seed: Seed, judged: Judged, *, route: Route, member: Member, reference: Judged | None) -> dict[str, Any]:
    """The row of a selected answer, with where everything in it comes from."""
    answer = judged.answer
    messages = conversation(seed, answer.message, route)
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    priced = member.price is not None and prompt is not None and completion is not None
    sampling = {k: v for k, v in answer.body.items() if k not in ("model", "messages", "tools", "seed")}
    verdicts = [
        {"judge": v.judge, "state": v.state, "score": v.score, "request_keys": list(v.request_keys)}
        | ({"detail": v.detail} if v.detail else {})
        for v in judged.verdicts
    ]
    return {
        "id": row_id(seed, answer.sample_index),
        "messages": messages,
        "tools": compact(list(seed.tools)) if seed.tools else None,
        "domain": seed.domain,
        "source": seed.source,
        "license": seed.license,
        "difficulty": seed.difficulty,
        "loss_on": route.loss_on,
        "generator": answer.member,
        "model": member.model,
        "revision": member.revision,
        "engine": member.engine,
        "generator_license": member.license,
        "outputs_may_train": member.outputs_may_train,
        "sampling": compact(sampling),
        "sampling_seed": answer.body.get("seed"),
        "finish_reason": answer.finish_reason,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "cost_usd": member.price.cost_usd(prompt, completion) if priced else None,  # type: ignore[union-attr, arg-type]
        "score": judged.score,
        "score_state": judged.score_state,
        "verdicts": compact(verdicts),
        "verifier": seed.verifier,
        "verifier_version": judged.verifier_version,
        "verify_state": judged.verify_state,
        "reward": judged.reward,
        "votes": judged.votes,
        "reference_member": reference.answer.member if reference else None,
        "reference_score": reference.score if reference else None,
        "seed_id": seed.seed_id,
        "sample_index": answer.sample_index,
        "request_key": answer.request_key,
        "text_digest": text_digest(duplicate_text(messages, "conversation")),
        "extra": compact(seed.extra or {}),
    }


def duplicate_text(messages: list[Message], what: str) -> str:
    """The text of a row that duplicates are looked for in: `conversation`, `prompt` or `answer`."""
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    chosen = {"conversation": messages, "prompt": messages[:last], "answer": messages[last:]}[what]
    return "\n".join(_said(m) for m in chosen if m["role"] not in ("system", "developer"))


def _said(message: Mapping[str, Any]) -> str:
    calls = [call.get("function") or {} for call in message.get("tool_calls") or []]
    written = [f"{call.get('name')} {_canonical(call.get('arguments'))}" for call in calls]
    return "\n".join([message.get("reasoning_content") or "", message.get("content") or "", *written]).lstrip("\n")


def _canonical(arguments: Any) -> str:
    """Arguments in one spelling, whether they come as JSON text or as an object."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return str(arguments)
    return compact(arguments)
