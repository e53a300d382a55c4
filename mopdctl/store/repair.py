"""Salvaging what is whole in a damaged store, and saying what is lost. Nothing is deleted: it moves to `lost/`."""

import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import file_digest
from mopdctl.records import Sample
from mopdctl.runs import locked
from mopdctl.store import disk, parquet, rows, schema
from mopdctl.store import manifest as manifests
from mopdctl.store.manifest import File, Manifest, Shard
from mopdctl.store.replay import recover, replay, writers
from mopdctl.store.store import sweep, write_shard
from mopdctl.store.verify import check_file, check_rows, read_meta, unnamed
from mopdctl.store.wal import WalWriter


@dataclass(frozen=True, slots=True)
class Repaired:
    """What a repair did."""

    manifest: int
    samples: int
    """Samples in the store now."""
    lost: list[str]
    """What could not be saved, one line each."""
    notes: list[str]
    moved: list[str]
    """Damaged files, by where they are now."""


def repair(folder: Path) -> Repaired:
    """Makes a store whole again out of what is whole in it.

    Starts from the newest sound manifest, keeps every sample whose payload matches its CRC, takes back whole files
    that only a damaged manifest named, and cuts damaged logs at the last good frame. Raises InputError if there is no
    store, or none of its manifests says what it is.
    """
    known = manifests.numbers(folder)
    if not known:
        manifests.newest(folder)  # says that there is no store
    with locked(folder), disk.writing(folder):
        base = _newest_sound(folder, known)
        sweep(folder)
        lost: list[str] = []
        notes: list[str] = []
        moved: list[Path] = []
        staging = folder / "_staging" / f"repair-{time.time_ns()}"
        disk.make_folder(staging)
        shards: list[Shard] = []
        ids: set[str] = set()
        for shard in base.shards:
            kept = _salvage(folder, shard, staging, lost, moved)
            if kept:
                shards.append(kept)
                ids |= {row["sample_id"] for row in read_meta(folder, kept)}
        damaged = [number for number in known if number > base.number]
        if damaged:
            for path in unnamed(folder):
                found = _adopt(folder, path, ids)
                if found:
                    shard, new = found
                    shards.append(shard)
                    ids |= new
                    notes.append(f"{path}: {len(new)} samples that a damaged manifest named are back")
        moved += [manifests.manifest_path(folder, number) for number in damaged]
        manifest = base
        if moved or shards != list(base.shards):
            _, parent = manifests.read(folder, base.number)
            manifest = Manifest(max(known) + 1, parent, base.identity, tuple(shards))
            manifests.publish(folder, manifest, staging)
        moved += _mend_logs(folder, staging, lost, notes)
        places = _put_away(folder, moved)
        shutil.rmtree(staging)
        return Repaired(manifest.number, manifest.rows, lost, notes, places)


def _newest_sound(folder: Path, known: Iterable[int]) -> Manifest:
    for number in sorted(known, reverse=True):
        try:
            return manifests.read(folder, number)[0]
        except InputError:
            raise
        except MopdctlError:
            continue
    raise InputError(f"{folder}: no manifest in it can be read, so nobody knows what its files are; restore a backup")


def _salvage(folder: Path, shard: Shard, staging: Path, lost: list[str], moved: list[Path]) -> Shard | None:
    """The shard as it is if it is whole, one of its whole samples otherwise, None if there are none."""
    bad_meta = check_file(folder / shard.meta.path, shard.meta)
    if bad_meta:  # nothing in it can be trusted, and the payload does not say whose it is
        lost.append(f"{shard.meta.path}: {bad_meta}; its {shard.rows} samples are lost")
        moved += [folder / shard.meta.path, folder / shard.payload.path]
        return None
    if not check_file(folder / shard.payload.path, shard.payload):
        return shard
    meta = read_meta(folder, shard)
    verdicts = list(check_rows(folder, meta))
    gone = [row["sample_id"] for row, good in verdicts if not good]
    shown = ", ".join(gone[:5]) + (", ..." if len(gone) > 5 else "")
    if gone:
        lost.append(f"{shard.payload.path}: {len(gone)} of {shard.rows} samples are lost ({shown})")
    moved += [folder / shard.meta.path, folder / shard.payload.path]
    samples = _samples(folder, [row for row, good in verdicts if good])
    return write_shard(folder, staging, samples)[0] if samples else None


def _samples(folder: Path, meta: list[dict[str, Any]]) -> list[Sample]:
    found = []
    for row in meta:
        reader = parquet.GroupReader(folder / row["payload_file"], schema.PAYLOAD)
        group = rows.PayloadGroup(reader.read(row["payload_row_group"]))
        found.append(rows.sample_from(row, group.arrays(row["payload_row"])))
        reader.close()
    return found


def _adopt(folder: Path, path: str, known: set[str]) -> tuple[Shard, set[str]] | None:
    """A pair of whole files that no sound manifest names, unless their samples are there already."""
    kind, _, name = path.partition("/")
    payload = folder / "payload" / name
    if kind != "meta" or not payload.is_file():
        return None
    entry = File(path, (folder / path).stat().st_size, file_digest(folder / path))
    guess = Shard(0, 0, meta=entry, payload=File(f"payload/{name}", payload.stat().st_size, file_digest(payload)))
    try:
        meta = read_meta(folder, guess)
    except MopdctlError:
        return None
    ids = {row["sample_id"] for row in meta}
    if not ids or ids & known or not all(good for _, good in check_rows(folder, meta)):
        return None
    tokens = sum(row["prompt_length"] + row["response_length"] for row in meta)
    return Shard(len(meta), tokens, meta=guess.meta, payload=guess.payload), ids


def _mend_logs(folder: Path, staging: Path, lost: list[str], notes: list[str]) -> list[Path]:
    """Cuts torn tails off; writes what is whole in a damaged log into a new segment. Returns what that replaces."""
    replaced = []
    log_folder = folder / "wal"
    for writer in writers(log_folder):
        try:
            notes += recover(log_folder, writer=writer).notes
            continue
        except InputError:
            raise
        except MopdctlError as error:
            lost.append(f"{error}; what was logged after that is lost and will be sampled again")
        found = replay(log_folder, writer=writer, salvage=True)
        # The fence makes the old segments count for nothing from the moment that the new one is there.
        with WalWriter(
            staging / "wal",
            writer=writer,
            level="host",
            epoch=found.epoch + 1,
            fence=dict.fromkeys(found.lengths, 0),
            max_segment_bytes=1 << 62,
        ) as log:
            for slot, sample in enumerate(found.samples.values()):
                log.append(sample.records(slot))
        for name in log.segments:
            disk.rename(staging / "wal" / name, log_folder / name)
        disk.sync_folder(log_folder)
        notes.append(f"wal: {len(found.samples)} samples of {writer} are saved")
        replaced += [log_folder / name for name in found.lengths]
    return replaced


def _put_away(folder: Path, files: Iterable[Path]) -> list[str]:
    places = []
    for path in files:
        if path.exists():
            target = folder / "lost" / f"{path.parent.name}-{path.name}"
            disk.make_folder(target.parent)
            disk.rename(path, target)
            disk.sync_folder(target.parent)
            places.append(str(target.relative_to(folder)))
    return places
