"""The steps by which files become durable.

Every one that a commit takes goes through here, so that a test can count them and pull the plug between any two.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mopdctl import files
from mopdctl.errors import InputError, MopdctlError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turns what the operating system says about a failed write into one line.

    Raises InputError for a full disk and for a folder that must not be written, MopdctlError for a failed device.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL or "File too large" in str(error) or "No space left" in str(error):
            raise InputError(
                f"{place}: the disk is full or a size limit is reached; make room and give the same command again, "
                "what is committed is safe"
            ) from error
        if error.errno in _READ_ONLY:
            raise InputError(f"{place}: must not be written ({error.strerror}); check its permissions") from error
        raise MopdctlError(f"{place}: cannot be written ({error.strerror or error})") from error


def make_folder(path: Path) -> None:
    """Makes a folder and its parents."""
    path.mkdir(parents=True, exist_ok=True)


def write_file(path: Path, data: bytes) -> None:
    """Writes a new file and syncs it. A failed sync is final: what the kernel dropped then is gone."""
    with path.open("xb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Makes the content of a closed file survive a power cut."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def rename(source: Path, target: Path) -> None:
    """Moves a file; it appears under its new name whole."""
    source.rename(target)


def publish(source: Path, target: Path) -> None:
    """Gives a file a second name. Raises FileExistsError if that is taken: a rename would replace it."""
    os.link(source, target)


def remove(path: Path) -> None:
    """Removes a file that may be gone already."""
    path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Makes new names in a folder survive a power cut."""
    files.sync_folder(path)
