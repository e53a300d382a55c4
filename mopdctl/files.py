r"""Reading what users write and writing files that appear whole.

Text is UTF-8, with or without a byte order mark. Lines end at the byte `\n` alone: `str.splitlines` would also cut at
U+2028 and its kin, which are ordinary characters inside a JSON string.
"""

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mopdctl.errors import InputError, MopdctlError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def read_text(path: Path) -> str:
    """The text of `path` without a byte order mark. Raises InputError if it is missing, a folder or not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder where a file is needed") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None


def read_json(path: Path) -> Any:
    """The JSON document in `path`. Raises InputError with line and column if it does not parse."""
    text = read_text(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}:{error.colno}: not JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:  # a number of more than 4300 digits, or nested too deep
        raise InputError(f"{path}: not JSON ({error})") from None


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number from 1, object) for each non-blank line of a JSONL file.

    Raises InputError naming the line for one that is not a JSON object.
    """
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno})") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}:{number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}:{number}: a {type(row).__name__} where a JSON object is needed")
        yield number, row


def dump_json(document: Any) -> str:
    """Strict JSON (NaN is an error), keys in the order given, characters unescaped."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False, indent=2)


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that takes the place of `path` when the block ends well: temporary file, fsync, rename.

    A reader sees the old file or the new one, never a part. Raises InputError, if it can before the block begins, where
    no file can be written, and MopdctlError where the device fails.
    """
    with _told(path):
        if path.is_dir():
            raise InputError(f"{path}: is a folder where a file is to be written; give the path of a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with _told(path, _FULL), os.fdopen(handle, "wb") as file:
            yield file  # what else fails here may be about another file
            with _told(path):
                file.flush()
                os.fsync(file.fileno())
        with _told(path):
            os.chmod(temporary, 0o644)  # noqa: PTH101 - the file is known by name only
            os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    with _told(path):
        sync_folder(path.parent)


@contextmanager
def _told(path: Path, only: Container[int] | None = None) -> Iterator[None]:
    """Says in one line, naming `path`, what the operating system says of a failed write; with `only`, of these."""
    try:
        yield
    except OSError as error:
        if only is not None and error.errno not in only:
            raise
        why = error.strerror or error
        if error.errno in _FULL:
            raise InputError(
                f"{path}: the disk is full or a size limit is reached ({why}); make room and try again"
            ) from error
        if error.errno == errno.EIO:
            raise MopdctlError(f"{path}: cannot be written ({why})") from error
        raise InputError(f"{path}: cannot be written ({why}); check the path and its permissions") from error


def write_text(path: Path, text: str) -> None:
    """Writes `text` whole."""
    with writing(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: Path, document: Any) -> None:
    """Writes one JSON document whole."""
    write_text(path, dump_json(document) + "\n")


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes one JSON object a line, the file whole. Rows are made once there is a file to write them to."""
    with writing(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n")


def sync_folder(folder: Path) -> None:
    """Makes a rename inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(data: bytes | str) -> str:
    """A 16-byte BLAKE2b digest in hex."""
    return hashlib.blake2b(data.encode() if isinstance(data, str) else data, digest_size=16).hexdigest()


def fingerprint(document: Any) -> str:
    """The digest of a JSON-like document; key order does not matter."""
    return digest(json.dumps(document, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")))


def file_digest(path: Path) -> str:
    """The digest of a file's bytes, read in pieces."""
    state = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            state.update(piece)
    return state.hexdigest()
