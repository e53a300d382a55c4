"""The token write-ahead log: tokens of samples that are still being written, so that they outlive who writes them.

A segment is one append-only file of one writer process, named `{epoch:06d}-{part:04d}-{writer}.wal`. A writer begins a
new epoch each time it starts, and a new part when a segment is full. A segment is a row of frames, little-endian:

    magic 4s, length of body u32, CRC-32 u32, number in the segment u64, body: records of type u8, length u32, payload

The first frame is the header with the segment's random salt, the second a fence. The CRC covers length, number, salt
and body, so that what surfaces of another file after a crash passes for nothing here.

An engine step is one frame, one write and one sync for all running samples. A write that was cut short leaves a bad
frame at the very end, a torn tail: it was never acknowledged, and is cut off. A bad frame with a good one after it is
damage, which is never passed over in silence.
"""

import json
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopdctl import __version__
from mopdctl.errors import InputError, MopdctlError
from mopdctl.store import disk

VERSION = 1
LEVELS = ("off", "process", "host")
"""What logged tokens survive: nothing (there is no log), the death of the process, that of the whole machine."""

_MAGIC = b"\xf5MW\xc1"  # 0xf5 occurs in no UTF-8 text
_FRAME = struct.Struct("<4sIIQ")
_RECORD = struct.Struct("<BI")
_U32 = struct.Struct("<I")
_NAME = re.compile(r"(\d{6,})-(\d{4,})-([A-Za-z0-9][A-Za-z0-9._-]*)\.wal")


@dataclass(frozen=True, slots=True)
class Header:
    """What a segment begins with. Its layout is the same in all versions."""

    version: int
    epoch: int
    salt: str
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Fence:
    """The writer of `epoch` has taken over after reading `lengths` bytes of earlier segments; no later byte counts.

    Every segment repeats the fence of its epoch, because the first ones are removed first.
    """

    epoch: int
    lengths: Mapping[str, int]

    def __post_init__(self) -> None:
        if not all(type(length) is int for length in self.lengths.values()):
            raise ValueError("a length is not a number of bytes")


@dataclass(frozen=True, slots=True, eq=False)
class Open:
    """A sample begins, or goes on in another process."""

    slot: int
    """Stands for the sample in the records of this writer and epoch."""
    sample_id: str
    attempt: int
    """How many processes have written at the sample, this one included."""
    prompt_ids: NDArray[np.int32]
    about: Mapping[str, Any]
    """Whatever else should be known of it; JSON."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """What the policy sampled in one engine step. A slot may occur several times, at consecutive positions."""

    policy_version: int
    slots: NDArray[np.uint32]
    positions: NDArray[np.uint32]
    """In the response, tool results included."""
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def __post_init__(self) -> None:
        if not len(self.slots) == len(self.positions) == len(self.token_ids) == len(self.logprobs):
            raise ValueError("columns of different lengths")


@dataclass(frozen=True, slots=True)
class Call:
    """A command of a sample is about to run."""

    slot: int
    number: int
    """Number of the command in its sample, from 0."""
    position: int
    """In the response, where its result will stand."""
    request: str


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """A command has run. The tokens of its result stand in the response from `position` on and carry no loss."""

    slot: int
    number: int
    position: int
    request: str
    result: str
    token_ids: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Finish:
    """A sample is complete."""

    slot: int
    reason: str


Record = Open | Tokens | Call | Tool | Finish
Entry = Header | Fence | Record

# One letter per field: u32, and behind a u32 length in bytes string, JSON, or an array of U(32), i(32), f(32).
_CODES = {Header: "uusj", Fence: "uj", Open: "usuij", Tokens: "uUUif", Call: "uuus", Tool: "uuussi", Finish: "us"}
_TYPES: tuple[type[Entry], ...] = tuple(_CODES)
_LAYOUT = {kind: [(f.name, code) for f, code in zip(fields(kind), _CODES[kind], strict=True)] for kind in _TYPES}
_DTYPES = {"U": np.dtype("<u4"), "i": np.dtype("<i4"), "f": np.dtype("<f4")}


def encode(record: Entry) -> bytes:
    """One record: type, length and payload. Raises ValueError for a number that does not fit its column."""
    parts = []
    for name, code in _LAYOUT[type(record)]:
        value = getattr(record, name)
        if code == "u":
            parts.append(_U32.pack(value))
            continue
        if code == "s":
            data = value.encode("utf-8", "surrogatepass")  # what a command printed need not be Unicode
        elif code == "j":
            data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
        else:
            column = np.asarray(value).astype(_DTYPES[code], copy=False)
            if code != "f" and column is not value and not np.array_equal(column, value):
                raise ValueError(f"{name} holds a number that is not {column.dtype}")
            data = column.tobytes()
        parts += (_U32.pack(len(data)), data)
    return _RECORD.pack(_TYPES.index(type(record)), sum(map(len, parts))) + b"".join(parts)


def decode(body: memoryview) -> list[Entry]:
    """The records of a frame. Raises ValueError if they do not parse; no size is believed before it is checked."""
    records = []
    try:
        while body:
            number, length = _RECORD.unpack_from(body)
            payload, body = body[_RECORD.size :][:length], body[_RECORD.size + length :]
            kind, values = _TYPES[number], []
            if len(payload) != length:
                raise ValueError("a record ends outside of its frame")
            for _, code in _LAYOUT[kind]:
                (value,) = _U32.unpack_from(payload)
                payload = payload[_U32.size :]
                if code != "u":
                    data, payload = payload[:value], payload[value:]
                    if len(data) != value:
                        raise ValueError("a field ends outside of its record")
                    value = _value(data, code)
                values.append(value)
            if payload:
                raise ValueError("a record is longer than its fields")
            records.append(kind(*values))
    except (struct.error, IndexError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return records


def _value(data: memoryview, code: str) -> Any:
    if code == "s":
        return str(data, "utf-8", "surrogatepass")
    if code != "j":
        return np.frombuffer(data, _DTYPES[code]).copy()
    document = json.loads(bytes(data))
    if not isinstance(document, dict):
        raise ValueError("a JSON field is no object")
    return document


@dataclass(frozen=True, slots=True, order=True)
class SegmentName:
    """A segment's name. Sorts in the order of reading."""

    epoch: int
    writer: str
    part: int

    def __str__(self) -> str:
        return f"{self.epoch:06d}-{self.part:04d}-{self.writer}.wal"

    @classmethod
    def parse(cls, text: str) -> "SegmentName | None":
        """The name in a file name; None if it is no segment's."""
        match = _NAME.fullmatch(text)
        return cls(int(match[1]), match[3], int(match[2])) if match else None


def read_frames(data: bytes, name: SegmentName) -> Iterator[tuple[int, list[Entry]]]:
    """Offset and records of each frame after the header. Raises BadFrameError at the first bad one."""
    salt, offset, number = b"", 0, 0
    while offset < len(data):
        frame = _frame_at(data, offset, salt)
        if frame is None:
            at = offset
            while (at := data.find(_MAGIC, at + 1)) >= 0:
                if not salt or _frame_at(data, at, salt):  # frames cannot be checked without a header
                    raise BadFrameError(offset, f"a sound frame follows at {at}")
            raise BadFrameError(offset, "not a whole frame", torn=True)
        found, body = frame
        try:
            records = decode(body)
        except ValueError as error:
            raise BadFrameError(offset, f"a record does not parse: {error}") from None
        if found != number or not records:
            raise BadFrameError(offset, f"frame {found} where {number} belongs")
        if number:
            yield offset, records
        else:
            salt = _salt(records[0], name)
        offset += _FRAME.size + len(body)
        number += 1


def _salt(header: Entry, name: SegmentName) -> bytes:
    if not isinstance(header, Header):
        raise BadFrameError(0, "no header")
    if header.version > VERSION:
        raise InputError(f"{name}: a token log of version {header.version}, this mopdctl reads {VERSION}; upgrade it")
    if (header.epoch, header.about.get("writer"), header.about.get("part")) != (name.epoch, name.writer, name.part):
        raise BadFrameError(0, "the header is that of another segment")
    return bytes.fromhex(header.salt)


def _frame_at(data: bytes, offset: int, salt: bytes) -> tuple[int, memoryview] | None:
    """Number and body of the frame at `offset`; None if there is no sound one."""
    start = offset + _FRAME.size
    if start > len(data):
        return None
    magic, length, crc, number = _FRAME.unpack_from(data, offset)
    if magic != _MAGIC or length > len(data) - start:
        return None
    body = memoryview(data)[start : start + length]
    return (number, body) if crc == _crc(length, number, salt, body) else None


def _frame(number: int, salt: bytes, body: bytes) -> bytes:
    return _FRAME.pack(_MAGIC, len(body), _crc(len(body), number, salt, body), number) + body


def _crc(length: int, number: int, salt: bytes, body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(struct.pack("<IQ", length, number) + salt))


class BadFrameError(Exception):
    """The bytes from `offset` on are not what was written; `torn` if nothing sound follows them."""

    def __init__(self, offset: int, reason: str, *, torn: bool = False) -> None:
        super().__init__(reason)
        self.offset, self.torn = offset, torn


class WalWriter:
    """Appends to the log of one writer. Makes its first segment at the first append."""

    def __init__(
        self,
        folder: Path,
        *,
        writer: str,
        level: str,
        epoch: int,
        fence: Mapping[str, int],
        max_segment_bytes: int = 64 << 20,
    ) -> None:
        """`epoch` is one more than that of the last `recover`, and `fence` its `lengths`. Writes nothing yet."""
        if level not in LEVELS:
            raise InputError(f"durability level {level!r}: use one of {', '.join(LEVELS)}")
        if not _NAME.fullmatch(str(SegmentName(epoch, writer, 0))):
            raise InputError(f"log writer {writer!r}: use letters, digits, '.', '_' or '-'")
        self.folder, self.level = folder, level
        self._writer, self._max_bytes = writer, max_segment_bytes
        self._fence = Fence(epoch, dict(fence))
        self._names: list[SegmentName] = []
        self._path = folder
        self._handle: int | None = None
        self._salt = b""
        self._size = self._number = 0
        self._usable = True

    def __enter__(self) -> "WalWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def segments(self) -> tuple[str, ...]:
        """Names of all segments that it has made."""
        return tuple(map(str, self._names))

    @property
    def segment(self) -> str | None:
        """Name of the one that it is appending to."""
        return None if self._handle is None else str(self._names[-1])

    def append(self, records: Iterable[Record]) -> None:
        """Logs records together. Once it returns they are as safe as the level promises.

        Raises InputError if the disk is full, MopdctlError for any other failure. Nothing can be appended after either:
        what the kernel dropped in a failed sync is gone, and nobody would notice.
        """
        if not self._usable:
            raise MopdctlError(f"{self.folder}: the token log is closed or has failed; nothing more can be logged")
        body = b"".join(map(encode, records)) if self.level != "off" else b""
        if not body:
            return
        self._usable = False
        if self._number > 2 and self._size + _FRAME.size + len(body) > self._max_bytes:
            self.rotate()
        if self._handle is None:
            self._begin()
        self._write(_frame(self._number, self._salt, body), frames=1)
        self._usable = True

    def rotate(self) -> None:
        """Ends the segment; the next append begins another part."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def close(self) -> None:
        """Ends the log."""
        self._usable = False
        self.rotate()

    def _begin(self) -> None:
        name = SegmentName(self._fence.epoch, self._writer, len(self._names))
        path = self.folder / str(name)
        with disk.writing(path):
            if not self.folder.is_dir():
                disk.make_folder(self.folder)
                disk.sync_folder(self.folder.parent)
            try:
                # Appending: a process that was replaced and lives on must not leave a hole where its tail was cut off.
                self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            except FileExistsError:
                raise MopdctlError(f"{path}: is there already; does another process write here?") from None
        self._names.append(name)
        self._path = path
        self._size = self._number = 0
        self._salt = os.urandom(8)
        about = {"writer": name.writer, "part": name.part, "level": self.level, "mopdctl": __version__}
        header = encode(Header(VERSION, name.epoch, self._salt.hex(), about))
        self._write(_frame(0, b"", header) + _frame(1, self._salt, encode(self._fence)), frames=2)

    def _write(self, data: bytes, *, frames: int) -> None:
        assert self._handle is not None
        with disk.writing(self._path):
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(self._handle, rest) :]
                if self.level == "host":
                    getattr(os, "fdatasync", os.fsync)(self._handle)  # macOS has no fdatasync
                    if not self._size:
                        disk.sync_folder(self.folder)
            except BaseException:
                with suppress(OSError):  # else it is a torn tail
                    os.ftruncate(self._handle, self._size)
                raise
        self._size += len(data)
        self._number += frames
