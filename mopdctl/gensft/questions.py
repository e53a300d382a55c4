"""Benchmark questions from files that users bring."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mopdctl.errors import InputError
from mopdctl.files import read_text
from mopdctl.gensft.question_parts import Document
from mopdctl.train.rows import iterate_rows

_FIELDS = ("question", "prompt", "text", "problem", "instruction")


def read_questions(path: Path) -> Iterator[Document]:
    """The questions in a JSONL or Parquet file, or in a text file with one a paragraph; the file is the benchmark.

    Raises InputError for a row without any of the fields that may hold a question.
    """
    if path.suffix not in (".jsonl", ".parquet"):
        for number, text in enumerate(filter(str.strip, re.split(r"\n\s*\n", read_text(path))), start=1):
            yield Document(path.stem, str(number), text)
        return
    for number, (place, row) in enumerate(iterate_rows(path), start=1):
        yield Document(path.stem, str(row.get("id", number)), _question(row, place), str(row.get("answer") or ""))


def _question(row: dict[str, Any], place: str) -> str:
    for field in _FIELDS:
        if isinstance(row.get(field), str):
            return str(row[field])
    messages = row.get("messages")
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        return "\n".join(str(m.get("content") or "") for m in messages if m.get("role") == "user")
    raise InputError(f"{place}: no question in it; one of {', '.join(_FIELDS)} or messages is needed")
