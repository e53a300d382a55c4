"""The journal: every attempt of every request with its raw response, one JSON line each, only ever appended to.

Whatever comes later (parsing, judging's sums, filters, the data set) is computed from it again, so that a killed run
goes on with what is written here. A line begins `{"k":"<32 hex>","c":"<CRC-32 of the rest>","s":"<state>"`, so that key
and state are found without parsing it. `ok` and `rejected` end a request; `sent` says that it is on its way; all other
states are tries that failed.
"""

import json
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import sync_folder

_FINAL = (b"ok", b"rejected")
_KEY, _CRC, _REST = slice(6, 38), slice(45, 53), slice(54, None)  # `{"k":"`, 32, `","c":"`, 8, `"`, `,"s":"...`
_STATE_FROM = 60
_BLOCK = 1 << 20


class _Offsets:
    """16-byte keys to integers in 24 bytes an entry: sorted arrays, and a small dictionary of new ones."""

    def __init__(self) -> None:
        self._new: dict[bytes, int] = {}
        self._keys: NDArray[np.uint64] = np.empty((0, 2), np.uint64)
        self._offsets: NDArray[np.int64] = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._offsets) + len(self._new)

    def __setitem__(self, key: bytes, offset: int) -> None:
        self._new[key] = offset
        if len(self._new) >= max(4096, len(self._offsets) // 8):
            self._merge()

    def get(self, key: bytes) -> int | None:
        """The offset of a key, None if it is not there."""
        found = self._new.get(key)
        if found is not None or not len(self._offsets):
            return found
        high, low = np.frombuffer(key, ">u8")
        at = int(np.searchsorted(self._keys[:, 0], high))
        while at < len(self._offsets) and self._keys[at, 0] == high:
            if self._keys[at, 1] == low:
                return int(self._offsets[at])
            at += 1
        return None

    def _merge(self) -> None:
        fresh = np.frombuffer(b"".join(self._new), ">u8").reshape(-1, 2).astype(np.uint64)
        keys = np.concatenate([self._keys, fresh])
        offsets = np.concatenate([self._offsets, np.fromiter(self._new.values(), np.int64, len(self._new))])
        order = np.argsort(keys[:, 0], kind="stable")
        self._keys, self._offsets = np.ascontiguousarray(keys[order]), offsets[order]
        self._new = {}


class Journal:
    """The one writer of a journal. The caller holds the lock of its folder.

    `notes` says what was found when it was opened: a torn tail that was cut, lines that cannot be read, requests that
    were on their way when the last run died.
    """

    def __init__(self, path: Path, *, reuse: Sequence[Path] = (), retry_rejected: bool = False) -> None:
        """Opens `path`, making it if need be; `reuse` are journals of other runs, which are only read.

        With `retry_rejected` a rejection answers nothing: the server may have learned to take the request.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.notes: list[str] = []
        self.calls = 0
        self._answered = _Offsets()
        self._final = _FINAL[:1] if retry_rejected else _FINAL
        try:
            torn = _cut_torn_tail(path)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror})") from None
        if torn:
            self.notes.append(f"{path}: the last line was cut short by the end of its writer; {torn} bytes removed")
        sync_folder(path.parent)
        self._end = os.fstat(self._file).st_size
        self.under_way = self._read()
        if self.under_way:
            self.notes.append(
                f"{self.under_way} requests were on their way when the last run ended; they are asked again under the "
                "same Idempotency-Key, and a server that does not know it may count them twice"
            )
        self._others = [(os.open(p, os.O_RDONLY), _offsets_of(p, self._final)) for p in reuse if p.exists()]
        self._synced = time.monotonic()

    def _read(self) -> int:
        """Fills the map; returns how many requests were sent and have no line after that."""
        sent: set[bytes] = set()
        bad = 0
        for offset, line in _lines(self.path):
            key, state = _head(line)
            if key is None:
                bad += 1
                continue
            if state == b"sent":
                sent.add(key)
                continue
            sent.discard(key)
            if state in self._final:
                self._answered[key] = _mark(offset, state)
        if bad:
            self.notes.append(f"{self.path}: {bad} lines cannot be read; what they held is asked for again")
        return len(sent)

    def __len__(self) -> int:
        """Answered requests in this journal."""
        return len(self._answered)

    def state(self, key: str) -> Literal["ok", "rejected"] | None:
        """How a request was answered, here or in a journal that is reused; None if it was not."""
        raw = bytes.fromhex(key)
        marks = [self._answered.get(raw), *(found.get(raw) for _, found in self._others)]
        mark = next((mark for mark in marks if mark is not None), None)
        return None if mark is None else "ok" if mark & 1 else "rejected"

    def get(self, key: str) -> dict[str, Any] | None:
        """The line that answered a request: `s` (state), `r` (raw response) and more; None if there is none.

        An answer out of a reused journal is copied into this one first, marked with `"o":1`: another run paid for it.
        """
        raw = bytes.fromhex(key)
        mark = self._answered.get(raw)
        if mark is not None:
            return dict(json.loads(_read_line(self._file, mark >> 1)))
        for handle, offsets in self._others:
            if (mark := offsets.get(raw)) is not None:
                rest = _read_line(handle, mark >> 1)[_REST]
                head, comma, tail = rest[1:].partition(b",")
                line = _line(key, b"," + head + b',"o":1' + comma + tail)
                self._answered[raw] = (self._end << 1) | (mark & 1)
                self._append(line)
                return dict(json.loads(line))
        return None

    def sent(self, key: str, most: tuple[float, int] = (0.0, 0)) -> None:
        """Notes that a request is about to leave, and the most USD and tokens that it can take."""
        self._append(_line(key, b',"s":"sent","w":%s}\n' % json.dumps(most).encode()))
        self.calls += 1

    def add(
        self, key: str, state: str, *, attempt: int, latency_s: float, member: str, raw: bytes, **more: Any
    ) -> None:
        """Writes the end of an attempt. `raw` is JSON text as it came; line breaks between its tokens become spaces."""
        head = {"m": member, "a": attempt, "t": round(time.time(), 3), "d": round(latency_s, 4), **more}
        text = json.dumps(head)[1:-1].encode()
        line = _line(key, b',"s":"%s",%s,"r":%s}\n' % (state.encode(), text, raw.translate(_SPACES) or b"null"))
        if state.encode() in _FINAL:
            self._answered[bytes.fromhex(key)] = _mark(self._end, state.encode())
        self._append(line)

    def _append(self, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            os.ftruncate(self._file, self._end)
            raise InputError(f"{self.path}: cannot be written ({error.strerror}); nothing before is lost") from None
        self._end += len(line)
        now = time.monotonic()
        if now - self._synced > 1:
            os.fdatasync(self._file)
            self._synced = now

    def entries(self) -> Iterator[dict[str, Any]]:
        """All readable lines, in the order in which they were written."""
        for _, line in _lines(self.path):
            if _head(line)[0] is not None:
                yield json.loads(line)

    def close(self) -> None:
        """Makes everything durable and closes the file."""
        os.fdatasync(self._file)
        os.close(self._file)
        for handle, _ in self._others:
            os.close(handle)


_SPACES = bytes.maketrans(b"\r\n", b"  ")


def _line(key: str, rest: bytes) -> bytes:
    return b'{"k":"%s","c":"%08x"%s' % (key.encode(), zlib.crc32(rest), rest)


def _mark(offset: int, state: bytes) -> int:
    """An offset with one bit that says whether the answer is `ok`."""
    return (offset << 1) | (state == b"ok")


def _head(line: bytes) -> tuple[bytes | None, bytes]:
    """Key and state of a line; no key if it is no whole line of ours."""
    try:
        key, crc = bytes.fromhex(line[_KEY].decode("ascii")), int(line[_CRC], 16)
    except ValueError:
        return None, b""
    frame = (line[:6], line[38:45], line[53:54])
    if frame != (b'{"k":"', b'","c":"', b'"') or len(key) != 16 or zlib.crc32(line[_REST]) != crc:
        return None, b""
    return key, line[_STATE_FROM : line.find(b'"', _STATE_FROM)]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    offset = 0
    with path.open("rb", buffering=_BLOCK) as file:
        for line in file:  # a binary file ends its lines at \n alone
            yield offset, line
            offset += len(line)


def _offsets_of(path: Path, final: Sequence[bytes]) -> _Offsets:
    found = _Offsets()
    for offset, line in _lines(path):
        key, state = _head(line)
        if key is not None and state in final:
            found[key] = _mark(offset, state)
    return found


def _read_line(handle: int, offset: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        piece = os.pread(handle, 1 << 14, offset + len(line))
        end = piece.find(b"\n")
        line += piece if end < 0 else piece[: end + 1]
        if not piece:
            raise MopdctlError("the journal was cut short under us; run the same command again")
    return line


def _cut_torn_tail(path: Path) -> int:
    """Removes what stands after the last line break; returns how many bytes that were."""
    if not path.exists():
        return 0
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        start = end
        while start:
            step = min(_BLOCK, start)
            file.seek(start - step)
            at = file.read(step).rfind(b"\n")
            if at >= 0:
                start = start - step + at + 1
                break
            start -= step
        if start < end:
            file.truncate(start)
            os.fsync(file.fileno())
        return end - start
