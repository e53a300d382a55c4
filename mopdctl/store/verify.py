"""Whether a store is whole: manifests, digests, row counts, references between the two tables, every payload's CRC."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import file_digest
from mopdctl.store import manifest as manifests
from mopdctl.store import parquet, rows, schema
from mopdctl.store.manifest import File, Shard
from mopdctl.store.replay import replay


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it was committed."""

    path: str
    """File inside the store."""
    what: str
    sample_ids: tuple[str, ...] = ()
    """Samples that it costs, as far as they are known."""
    rows: int = 0
    """How many samples it costs."""

    def line(self) -> str:
        """For a human."""
        cost = f" ({self.rows} samples)" if self.rows else ""
        return f"{self.path}: {self.what}{cost}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was looked at and what was found."""

    manifest: int
    shards: int
    samples: int
    """Samples that the manifest names."""
    waiting: int
    """Samples in the log that no manifest names yet."""
    problems: list[Problem]
    notes: list[str]
    """What is worth saying and costs nothing."""


def verify(folder: Path) -> Verdict:
    """Reads everything in a store once and says what is damaged. Changes nothing.

    Raises InputError if there is no store or a newer mopdctl made it.
    """
    problems: list[Problem] = []
    found: manifests.Manifest | None = None
    previous: manifests.Manifest | None = None
    for number in reversed(manifests.numbers(folder)):
        try:
            manifest, digest = manifests.read(folder, number)
        except InputError:
            raise
        except MopdctlError as error:
            problems.append(Problem(f"manifest/{number:020d}.json", str(error).rpartition(": ")[2]))
            continue
        found = found or manifest
        if previous is not None and previous.number == number + 1 and previous.parent != digest:
            problems.append(Problem(f"manifest/{previous.number:020d}.json", "does not follow the manifest before it"))
        previous = manifest
    if found is None:
        if problems:
            return Verdict(-1, 0, 0, 0, problems, [])
        manifests.newest(folder)  # says that there is no store
        raise AssertionError
    seen: dict[str, str] = {}
    for shard in found.shards:
        problems += check_shard(folder, shard, seen)
    notes = [
        f"{path}: no manifest names it; the next writer removes it once it is an hour old" for path in unnamed(folder)
    ]
    waiting = 0
    try:
        log = replay(folder / "wal")
        waiting = len(log.samples.keys() - seen.keys())
        notes += log.notes
    except MopdctlError as error:
        problems.append(Problem("wal", str(error)))
    return Verdict(found.number, len(found.shards), found.rows, waiting, problems, notes)


def check_shard(folder: Path, shard: Shard, seen: dict[str, str]) -> Iterator[Problem]:
    """What is wrong with one shard. Adds its sample ids to `seen`, id to file."""
    whole = True
    for entry in (shard.meta, shard.payload):
        what = check_file(folder / entry.path, entry)
        if what and entry is shard.meta:
            yield Problem(entry.path, what, rows=shard.rows)
            return
        if what:
            whole = False
            yield Problem(entry.path, what, rows=0)
    try:
        meta = read_meta(folder, shard)
    except MopdctlError as error:
        yield Problem(shard.meta.path, str(error), rows=shard.rows)
        return
    if len(meta) != shard.rows:
        yield Problem(shard.meta.path, f"{len(meta)} rows, the manifest says {shard.rows}")
    for row in meta:
        if row["sample_id"] in seen:
            yield Problem(shard.meta.path, f"sample {row['sample_id']} is also in {seen[row['sample_id']]}")
        seen[row["sample_id"]] = shard.meta.path
    bad = [row["sample_id"] for row, good in check_rows(folder, meta) if not good]
    if bad:
        shown = ", ".join(bad[:5]) + (", ..." if len(bad) > 5 else "")
        yield Problem(shard.payload.path, f"payload of {shown} is damaged", tuple(bad), len(bad))
    elif not whole:
        yield Problem(shard.payload.path, "differs from what was committed, but every sample in it is whole")


def check_file(path: Path, entry: File) -> str | None:
    """What is wrong with a file's size or bytes, None if nothing."""
    if not path.is_file():
        return "missing"
    if path.stat().st_size != entry.bytes:
        return f"{path.stat().st_size} bytes, committed {entry.bytes}"
    return "its bytes are not those that were committed" if file_digest(path) != entry.digest else None


def read_meta(folder: Path, shard: Shard) -> list[dict[str, Any]]:
    """The metadata rows of a shard. Raises MopdctlError if the file cannot be read."""
    try:
        table = parquet.read_table(str(folder / shard.meta.path), schema=schema.META)
    except parquet.DAMAGE as error:
        raise MopdctlError(f"cannot be read ({(str(error).splitlines() or ['?'])[0]})") from None
    found: list[dict[str, Any]] = table.to_pylist()
    return found


def check_rows(folder: Path, meta: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], bool]]:
    """Each metadata row with whether its payload is there, whole, and as long as the row says."""
    reader: parquet.GroupReader | None = None
    key, group, opened = None, None, None
    for row in meta:
        if (path := row["payload_file"]) != opened:
            opened, key = path, None
            try:
                reader = parquet.GroupReader(folder / path, schema.PAYLOAD)
            except MopdctlError:
                reader = None
        if (place := (path, row["payload_row_group"])) != key:
            key, group = place, None
            try:
                group = rows.PayloadGroup(reader.read(row["payload_row_group"])) if reader else None
            except MopdctlError:
                group = None
        yield row, group is not None and _row_is_whole(row, group)


def _row_is_whole(row: dict[str, Any], group: rows.PayloadGroup) -> bool:
    number = int(row["payload_row"])
    try:
        if number >= group.rows or group.sample_id(number) != row["sample_id"]:
            return False
        arrays = group.arrays(number)
    except parquet.DAMAGE:
        return False
    return bool(
        rows.payload_crc(arrays) == row["payload_crc"]
        and len(arrays["tokens"]) == row["prompt_length"] + row["response_length"]
        and int(arrays["loss_mask"].sum()) == row["loss_tokens"]
    )


def unnamed(folder: Path) -> list[str]:
    """Data files that no sound manifest names."""
    named: set[str] = set()
    for number in manifests.numbers(folder):
        try:
            named |= manifests.read(folder, number)[0].files.keys()
        except MopdctlError:
            continue
    there = {f"{kind}/{path.name}" for kind in ("meta", "payload") for path in (folder / kind).glob("*")}
    return sorted(there - named)
