"""Whether a store is whole: manifests, digests, row counts, references between the two tables, every payload's CRC."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import file_digest
from mopdctl.store import manifest as manifests
from mopdctl.store import parquet, rows, schema
from mopdctl.store.manifest import File, Shard
from mopdctl.store.replay import replay, writers


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
        cost = f" ({self.rows} sample{'s' * (self.rows > 1)})" if self.rows else ""
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
    then = "the next writer removes it once it is an hour old"
    if problems:
        then = "`mopdctl store repair` finds out whether a damaged one did"
    notes = [f"{path}: no sound manifest names it; {then}" for path in unnamed(folder)]
    seen: dict[str, str] = {}
    for shard in found.shards:
        problems += check_shard(folder, shard, seen)
    waiting: set[str] = set()
    for writer in writers(folder / "wal"):  # each its own, as those who take them over do
        try:
            log = replay(folder / "wal", writer=writer)
        except InputError:
            raise
        except MopdctlError as error:
            problems.append(Problem(*log_damage(folder, error)))
            continue
        waiting |= log.samples.keys() - seen.keys()
        notes += log.notes
    return Verdict(found.number, len(found.shards), found.rows, len(waiting), problems, notes)


def log_damage(folder: Path, error: MopdctlError) -> tuple[str, str]:
    """Which file of the log inside the store an error of `replay` is about, and what is wrong with it."""
    path, _, what = str(error).removeprefix(f"{folder}/").partition(": ")
    return path, what.removesuffix("; run `mopdctl store repair`")


def named(sample_ids: Sequence[str]) -> str:
    """Some samples for a human, the first of them by name."""
    return ", ".join(sample_ids[:5]) + (", ..." if len(sample_ids) > 5 else "")


def check_shard(folder: Path, shard: Shard, seen: dict[str, str]) -> Iterator[Problem]:
    """What is wrong with one shard. Adds its sample ids to `seen`, id to file."""
    if what := check_file(folder / shard.meta.path, shard.meta):
        yield Problem(shard.meta.path, what, rows=shard.rows)
        return
    try:
        meta = read_meta(folder, shard.meta.path)
    except MopdctlError as error:
        yield Problem(shard.meta.path, str(error), rows=shard.rows)
        return
    tokens = sum(row["prompt_length"] + row["response_length"] for row in meta)
    if (len(meta), tokens) != (shard.rows, shard.tokens):
        found = f"{len(meta)} samples of {tokens} tokens"
        yield Problem(shard.meta.path, f"{found}, the manifest says {shard.rows} of {shard.tokens}")
    twice: dict[str, list[str]] = {}
    for row in meta:
        if row["sample_id"] in seen:
            twice.setdefault(seen[row["sample_id"]], []).append(row["sample_id"])
        seen[row["sample_id"]] = shard.meta.path
    for other, ids in twice.items():
        yield Problem(shard.meta.path, f"{named(ids)}: also in {other}", tuple(ids), len(ids))
    for what, ids in _misjudged(meta).items():
        then = "`mopdctl rollout --reverify` scores them again"
        yield Problem(shard.meta.path, f"{what} for {named(ids)}; {then}", tuple(ids))
    if astray := [row["sample_id"] for row in meta if row["payload_file"] != shard.payload.path]:
        what = f"points away from {shard.payload.path} for {named(astray)}"
        yield Problem(shard.meta.path, what, tuple(astray), len(astray))
    bad = [row["sample_id"] for row, arrays in check_rows(folder, meta) if arrays is None]
    if what := check_file(folder / shard.payload.path, shard.payload):
        what = f"payload of {named(bad)} is lost: {what}" if bad else f"{what}, but every sample in it is whole"
        yield Problem(shard.payload.path, what, tuple(bad), len(bad))
    elif bad:
        yield Problem(
            shard.payload.path, f"payload of {named(bad)} is not what its metadata says", tuple(bad), len(bad)
        )
    elif (count := pq.read_metadata(folder / shard.payload.path).num_rows) != len(meta):
        yield Problem(shard.payload.path, f"{count} rows, the metadata knows of {len(meta)}")


def _misjudged(meta: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Samples whose reward does not go with their verdict, by what is wrong. Their tokens are none the worse."""
    found: dict[str, list[str]] = {}
    for row in meta:
        if what := rows.verdict_problem(row):
            found.setdefault(what, []).append(row["sample_id"])
    return found


def check_file(path: Path, entry: File) -> str | None:
    """What is wrong with a file's size or bytes, None if nothing."""
    if not path.is_file():
        return "missing"
    if path.stat().st_size != entry.bytes:
        return f"{path.stat().st_size} bytes, committed {entry.bytes}"
    try:
        return "its bytes are not those that were committed" if file_digest(path) != entry.digest else None
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def read_meta(folder: Path, path: str) -> list[dict[str, Any]]:
    """The rows of a metadata file. Raises MopdctlError if it cannot be read."""
    try:
        table = parquet.read_table(str(folder / path), schema=schema.META, later=schema.SINCE_2)
    except parquet.DAMAGE as error:
        raise MopdctlError(f"cannot be read ({(str(error).splitlines() or ['?'])[0]})") from None
    found: list[dict[str, Any]] = table.to_pylist()
    return found


def check_rows(folder: Path, meta: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Each metadata row with its payload, or None if that is not there, whole, and as long as the row says."""
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
        yield row, _whole_payload(row, group) if group else None


def _whole_payload(row: dict[str, Any], group: rows.PayloadGroup) -> dict[str, Any] | None:
    number = int(row["payload_row"])
    try:
        if number >= group.rows or group.sample_id(number) != row["sample_id"]:
            return None
        arrays = group.arrays(number)
    except parquet.DAMAGE:
        return None
    whole = (
        rows.payload_crc(arrays) == row["payload_crc"]
        and len(arrays["tokens"]) == row["prompt_length"] + row["response_length"]
        and int(arrays["loss_mask"].sum()) == row["loss_tokens"]
    )
    return arrays if whole else None


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
