"""Prompts from a file of rows."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from mopdctl.errors import InputError
from mopdctl.records import Prompt
from mopdctl.train.data import read_rows, row_messages, row_tools


def read_prompts(path: Path, routing_keys: tuple[str, ...], *, required: bool = True) -> list[Prompt]:
    """The prompts in a JSONL or Parquet file. Raises InputError naming the row for one that cannot be used.

    `required` demands every routing key of every row; else a prompt has those that its row has.
    """
    prompts = []
    for number, (place, row) in enumerate(read_rows(path)):
        for key in routing_keys:
            if not isinstance(row.get(key), str) and (required or row.get(key) is not None):
                raise InputError(f"{place}: no text in routing field {key!r}; every prompt needs one")
        messages = row_messages(row, place)
        if messages[-1]["role"] == "assistant":
            raise InputError(f"{place}: the last message is the assistant's; a prompt ends before the answer")
        tools = row_tools(row, place)
        prompts.append(
            Prompt(
                prompt_id=str(row.get("id", number)),
                messages=tuple(messages),
                tools=tuple(tools) if tools else None,
                routing={key: row[key] for key in routing_keys if row.get(key) is not None},
                reference=row.get("reference"),
                verifier=row.get("verifier"),
                environment=_object(row, "environment", place),
                place=place,
            )
        )
    prompt_id, count = Counter(p.prompt_id for p in prompts).most_common(1)[0]
    if count > 1:
        places = [p.place for p in prompts if p.prompt_id == prompt_id]
        raise InputError(f"{places[1]}: id {prompt_id!r} stands on {count} rows, first at {places[0]}; make ids unique")
    return prompts


def _object(row: dict[str, Any], field: str, place: str) -> dict[str, Any] | None:
    """A field that holds an object, or its JSON text where a table has no column of one shape for it."""
    value = row.get(field)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InputError(f"{place}: {field!r} is not JSON ({error})") from None
    if value is not None and not isinstance(value, dict):
        raise InputError(f"{place}: {field!r} is a {type(value).__name__}, not an object")
    return value
