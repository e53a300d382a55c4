"""What is written already: one line for each module or tensor that is whole, with the digests of its bytes."""

import json
from pathlib import Path
from typing import Any

from mopdctl.quant.write import Parts

Entry = dict[str, Any]
"""`{"name": ..., "digests": {tensor: digest}, "statistics": {...}}`."""


class Journal:
    """The lines that a run may build on, and the file that further ones go to.

    A line is written once its bytes are. Bytes that a machine lost with its power do not fit their digest.
    """

    def __init__(self, path: Path, parts: Parts) -> None:
        """Reads what is there, and forgets lines cut short and those whose bytes are not what they say."""
        self.entries: dict[str, Entry] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_bytes().split(b"\n") if path.exists() else []:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if all(name in parts.tensors and parts.digest(name) == found for name, found in entry["digests"].items()):
                self.entries[entry["name"]] = entry
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(_line(entry) for entry in self.entries.values()), "utf-8")
        temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def add(self, name: str, digests: dict[str, str], statistics: dict[str, Any]) -> None:
        """Says that a module or tensor is written."""
        entry = {"name": name, "digests": digests, "statistics": statistics}
        self._file.write(_line(entry))
        self._file.flush()
        self.entries[name] = entry

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _line(entry: Entry) -> str:
    return json.dumps(entry, allow_nan=False) + "\n"
