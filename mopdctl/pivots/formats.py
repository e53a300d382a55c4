"""Trajectory files of any known format, document by document."""

import difflib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mopdctl.errors import InputError
from mopdctl.files import read_text
from mopdctl.pivots.atif import import_atif
from mopdctl.pivots.audit import Reason, Skip, UnusableError
from mopdctl.pivots.chat import import_chat, row_id
from mopdctl.pivots.responses_import import import_responses
from mopdctl.pivots.trajectory import Trajectory
from mopdctl.train.rows import iterate_rows
from mopdctl.verifiers.base import MOST_DEPTH, deeper_than

Importer = Callable[[dict[str, Any], str], Iterator[Trajectory]]
"""From a parsed document and its place to its trajectories (one, unless others are embedded). Raises UnusableError."""

IMPORTERS: dict[str, Importer] = {"chat": import_chat, "responses": import_responses, "atif": import_atif}


_RESPONSES = ("input", "items", "output", "response")


def detect_format(row: dict[str, Any]) -> str | None:
    """The format of a document by the fields it has; None if it is none of them.

    Fields that are null or empty count only where no format has a full one: a table gives every row every column.
    Messages go before `input` and `output`, which may be columns of the user's own, but not before a request.
    """
    versioned = str(row.get("schema_version", "")).startswith("ATIF")
    full = {key for key, value in row.items() if value not in (None, "", [], {})}
    for keys in (full, row.keys()):
        if "steps" in keys and (("agent" in keys and isinstance(row["steps"], list)) or versioned):
            return "atif"
        if "responses_create_params" in keys:
            return "responses"
        if "messages" in keys:
            return "chat"
        if not keys.isdisjoint(_RESPONSES):
            return "responses"
    return None


def read_trajectories(paths: Iterable[Path], *, format: str | None = None) -> Iterator[Trajectory | Skip]:
    """The trajectories of files in order, one document in memory at a time; a Skip for each document that has none.

    JSONL and Parquet have a document a row. Any other file is one JSON document or a list of them, and in memory whole;
    where it is JSON lines under another name, it is read as such.

    Args:
        paths: Files.
        format: A key of IMPORTERS; None finds it for each document.

    Raises:
        InputError: An unknown format; a file that is missing, unreadable or as a whole not JSON or Parquet.
    """
    if format is not None and format not in IMPORTERS:
        near = difflib.get_close_matches(format, IMPORTERS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known formats: {', '.join(IMPORTERS)}"
        raise InputError(f"unknown trajectory format {format!r}; {hint}")
    for path in paths:
        for place, document in _documents(path):
            if isinstance(document, UnusableError):
                yield Skip(place, None, document.reason, place, str(document))
            else:
                yield from import_document(document, place, format=format)


def import_document(document: Any, place: str, *, format: str | None = None) -> Iterator[Trajectory | Skip]:
    """The trajectories of one parsed document, or the Skip that says why there is none."""
    trajectory_id = place
    try:
        if not isinstance(document, dict):
            raise UnusableError(Reason.MALFORMED, f"a {type(document).__name__} where a JSON object is needed")
        trajectory_id = row_id(document, "trajectory_id", "session_id", "id", "instance_id") or place
        name = format or detect_format(document)
        if name is None:
            raise UnusableError(
                Reason.UNKNOWN_FORMAT, "has neither 'messages' (chat), 'input' (responses) nor 'steps' (atif)"
            )
        if format == "chat" and "messages" not in document:
            raise UnusableError(Reason.MALFORMED, "has no 'messages'")
        found = list(IMPORTERS[name](document, place))
        for trajectory in found:
            _check_json(trajectory)
    except UnusableError as error:
        yield Skip(trajectory_id, None, error.reason, place, str(error))
    except RecursionError:
        yield Skip(trajectory_id, None, Reason.MALFORMED, place, "nested too deep")
    except (TypeError, ValueError, OverflowError, LookupError, AttributeError) as error:
        # A shape that no importer thought of is a bad document, not the end of all others.
        yield Skip(trajectory_id, None, Reason.MALFORMED, place, f"cannot be read ({type(error).__name__}: {error})")
    else:
        yield from found


def _check_json(trajectory: Trajectory) -> None:
    """Raises UnusableError for what could not be written again: NaN, half characters, dates of a table, great depth."""
    messages = [step.message for step in trajectory.steps]
    held = [trajectory.trajectory_id, trajectory.domain, trajectory.tools, trajectory.environment, messages]
    if any(deeper_than(value, MOST_DEPTH) for value in held):
        raise UnusableError(Reason.MALFORMED, f"nested deeper than {MOST_DEPTH} levels")
    try:
        json.dumps(held, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise UnusableError(Reason.MALFORMED, "holds half a character (a lone surrogate)") from None
    except (TypeError, ValueError) as error:
        raise UnusableError(Reason.MALFORMED, f"holds what JSON cannot ({error})") from None


def _documents(path: Path) -> Iterator[tuple[str, Any]]:
    """Each document with its place, or in its stead the UnusableError that says why it is none."""
    if path.suffix == ".parquet":
        for number, (_, row) in enumerate(iterate_rows(path)):
            yield f"{path}#{number}", row
        return
    if path.suffix in (".jsonl", ".ndjson"):
        yield from _lines(path)
        return
    text = read_text(path)
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data" or "\n" not in text[: error.pos + 1]:
            raise InputError(f"{path}:{error.lineno}:{error.colno}: not JSON ({error.msg})") from None
        yield from _lines(path)
        return
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error})") from None
    for number, document in enumerate(whole if isinstance(whole, list) else [whole]):
        yield f"{path}#{number}", document


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    with file:
        for number, line in enumerate(file, start=1):
            if line.strip(b"\xef\xbb\xbf \t\r\n"):
                yield f"{path}:{number}", _parsed(line)


def _parsed(line: bytes) -> Any:
    torn = "" if line.endswith(b"\n") else "in the last line, which may be torn: "
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return UnusableError(Reason.NOT_JSON, f"{torn}not UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        return UnusableError(Reason.NOT_JSON, f"{torn}{error.msg.removesuffix(' at')} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return UnusableError(Reason.NOT_JSON, f"{torn}{error}")
