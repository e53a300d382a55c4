"""What judges replied in one step of a run, raw, one JSON line each, only ever appended to.

A step that is repeated after a kill finds its replies here: nothing is asked or paid twice, and the same replies make
the same rewards. What a reply means is read off again each time.
"""

import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mopdctl.errors import InputError
from mopdctl.files import sync_folder

OK = "ok"


@dataclass(frozen=True, slots=True)
class Entry:
    """How one request ended."""

    key: str
    """The fingerprint of endpoint and body."""
    state: str
    """`ok`, or the kind of the error that it was given up for."""
    raw: str
    """The response as it came; of an error, what the server said."""
    detail: str = ""
    """One line for a human; empty where the state is `ok`."""

    def line(self) -> bytes:
        """The entry with the CRC-32 of its JSON text, which is ASCII and so holds no line break."""
        text = _dumps(asdict(self))
        return f'{{"crc": "{zlib.crc32(text.encode()):08x}", "entry": {text}}}\n'.encode()


def _dumps(document: dict[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=True)


def _read_line(line: bytes) -> Entry | None:
    """The entry in a line; None if it is no whole line of ours."""
    try:
        document = json.loads(line)
        entry = Entry(**document["entry"])
        return entry if entry.line() == line + b"\n" else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


class ReplyJournal:
    """The one writer of a step's journal. Of two entries with one key the later one counts."""

    def __init__(self, path: Path) -> None:
        """Opens `path`, making it if need be. Raises InputError if it cannot be written."""
        self.path = path
        self.notes: list[str] = []
        """What was found that should not be: a torn end that was cut, lines that cannot be read."""
        self._entries: dict[str, Entry] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            *lines, torn = path.read_bytes().split(b"\n")
            self._end = sum(len(line) + 1 for line in lines)
            os.ftruncate(self._file, self._end)
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror})") from None
        sync_folder(path.parent)
        found = [_read_line(line) for line in lines]
        self._entries = {entry.key: entry for entry in found if entry is not None}
        if torn:
            self.notes.append(
                f"{path}: the last line was cut short by the end of its writer; {len(torn)} bytes removed"
            )
        if bad := found.count(None):
            self.notes.append(f"{path}: {bad} lines cannot be read; what they held is asked for again")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get(self, key: str) -> Entry | None:
        """How a request ended; None if it has not."""
        return self._entries.get(key)

    def add(self, entry: Entry) -> None:
        """Appends an entry. Raises InputError if it cannot be written, and then leaves no part of it."""
        rest = memoryview(entry.line())
        size = len(rest)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            os.ftruncate(self._file, self._end)
            raise InputError(f"{self.path}: cannot be written ({error.strerror}); nothing before is lost") from None
        self._end += size
        self._entries[entry.key] = entry

    def close(self) -> None:
        """Makes everything durable and closes the file."""
        os.fdatasync(self._file)
        os.close(self._file)
