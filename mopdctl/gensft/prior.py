"""Earlier data sets, which new rows must not repeat: their texts."""

from collections.abc import Iterator
from pathlib import Path

from mopdctl.files import file_digest, fingerprint
from mopdctl.gensft.rows import duplicate_text
from mopdctl.runs import Workspace
from mopdctl.train.data import row_messages
from mopdctl.train.rows import data_files, iterate_rows


def prior_digest(workspace: Workspace, base: Path, name: str) -> str:
    """The digest of an earlier data set's files."""
    return fingerprint([file_digest(path) for path in _files(workspace, base, name)])


def _files(workspace: Workspace, base: Path, name: str) -> list[Path]:
    """All files of an earlier data set, its validation split too."""
    files = data_files(Path(name), base=base, workspace=workspace.root)
    return sorted(files[0].parent.glob("*.parquet")) if files[0].parent.name == "data" else files


def read_texts(workspace: Workspace, base: Path, name: str, on: str) -> Iterator[str]:
    """The text of each conversation in an earlier data set, as duplicates are looked for."""
    for path in _files(workspace, base, name):
        for place, row in iterate_rows(path):
            messages = row_messages(row, place)
            if any(message["role"] == "assistant" for message in messages):
                yield duplicate_text(messages, on)
