"""Salvaging what is whole in a damaged store, and saying what is lost. Nothing is deleted: it moves to `lost/`."""

import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import file_digest
from mopdctl.runs import locked
from mopdctl.store import disk, rows
from mopdctl.store import manifest as manifests
from mopdctl.store.manifest import File, Manifest, Shard
from mopdctl.store.replay import recover, replay, writers
from mopdctl.store.store import sweep, write_shard
from mopdctl.store.verify import check_file, check_rows, log_damage, named, read_meta, unnamed
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


@dataclass(frozen=True, slots=True)
class _Story:
    """What a repair has to tell at its end."""

    lost: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    damaged: list[Path] = field(default_factory=list)
    """Files that have to go."""

    def give_up(self, folder: Path, path: str, what: str) -> None:
        """Says that a file which no sound manifest names is of no use."""
        self.lost.append(f"{path}: {what}; samples of a damaged manifest may be lost")
        self.damaged.append(folder / path)


_NO_HALF = "its other half is missing"


def repair(folder: Path) -> Repaired:
    """Makes a store whole again out of what is whole in it.

    Starts from the newest sound manifest, keeps every sample whose payload matches its CRC, takes back samples that
    only a damaged manifest named, and cuts damaged logs at the last good frame. Raises InputError if there is no
    store, or none of its manifests says what it is.
    """
    known = manifests.numbers(folder)
    if not known:
        manifests.newest(folder)  # says that there is no store
    with disk.writing(folder), locked(folder):
        base, digest, bad = _manifests(folder, known)
        for name in ("meta", "payload", "wal", "_staging"):  # not every way of copying keeps an empty folder
            disk.make_folder(folder / name)
        sweep(folder)
        story = _Story()
        staging = folder / "_staging" / f"repair-{time.time_ns()}"
        disk.make_folder(staging)
        shards = [kept for shard in base.shards if (kept := _salvage(folder, shard, staging, story))]
        newer_is_bad = any(number > base.number for number in bad)
        if newer_is_bad:
            ids = {row["sample_id"] for shard in shards for row in read_meta(folder, shard.meta.path)}
            made = {path for shard in shards for path in (shard.meta.path, shard.payload.path)}
            left = sorted(set(unnamed(folder)) - made)
            pointed = set[str]()
            for path in sorted(
                (path for path in left if path.startswith("meta/")),
                key=lambda path: -(folder / path).stat().st_mtime_ns,  # of two for one payload, that with newer scores
            ):
                if found := _take_back(folder, path, pointed, ids, staging, story):
                    shards.append(found)
                    ids |= {row["sample_id"] for row in read_meta(folder, found.meta.path)}
            for path in left:
                if path.startswith("payload/") and path not in pointed:
                    story.give_up(folder, path, _NO_HALF)
        manifest = base
        if newer_is_bad or shards != list(base.shards):
            manifest = Manifest(max(known) + 1, digest, base.identity, tuple(shards))
            manifests.publish(folder, manifest, staging)
        story.damaged.extend(manifests.manifest_path(folder, number) for number in bad)
        places = _put_away(folder, story.damaged)
        places += _put_away(folder, _mend_logs(folder, staging, story))
        shutil.rmtree(staging)
        return Repaired(manifest.number, manifest.rows, story.lost, story.notes, places)


def _manifests(folder: Path, known: Iterable[int]) -> tuple[Manifest, str, list[int]]:
    """The newest sound manifest with its digest, and the numbers of those that are damaged or do not lead to it."""
    sound: list[tuple[Manifest, str]] = []
    bad = []
    for number in sorted(known, reverse=True):
        try:
            manifest, digest = manifests.read(folder, number)
        except InputError:
            raise
        except MopdctlError:
            bad.append(number)
            continue
        if sound and sound[-1][0].number == number + 1 and sound[-1][0].parent != digest:
            bad.append(number)
        else:
            sound.append((manifest, digest))
    if not sound:
        raise InputError(
            f"{folder}: no manifest in it can be read, so nobody knows what its files are; restore a backup"
        )
    return *sound[0], bad


def _salvage(folder: Path, shard: Shard, staging: Path, story: _Story) -> Shard | None:
    """The shard as it is if it is whole, one of its whole samples otherwise, None if there are none."""
    pair = [folder / shard.meta.path, folder / shard.payload.path]
    bad_meta = check_file(pair[0], shard.meta)
    if bad_meta:  # nothing in it can be trusted, and the payload does not say whose it is
        story.lost.append(f"{shard.meta.path}: {bad_meta}; its {shard.rows} samples are lost")
        story.damaged.extend(pair)
        return None
    if not check_file(pair[1], shard.payload):
        return shard
    story.damaged.extend(pair)
    return _rescue(folder, shard.payload.path, read_meta(folder, shard.meta.path), staging, story)


def _rescue(folder: Path, path: str, meta: list[dict[str, Any]], staging: Path, story: _Story) -> Shard | None:
    """A new shard of the samples that are whole in the payload file `path`; None if none is. Says which are lost."""
    payloads = list(check_rows(folder, meta))
    gone = [row["sample_id"] for row, arrays in payloads if arrays is None]
    if gone:
        story.lost.append(f"{path}: {len(gone)} of {len(meta)} samples are lost ({named(gone)})")
    samples = [rows.sample_from(row, arrays) for row, arrays in payloads if arrays is not None]
    return write_shard(folder, staging, samples)[0] if samples else None


def _take_back(
    folder: Path, path: str, pointed: set[str], known: set[str], staging: Path, story: _Story
) -> Shard | None:
    """What is whole in a metadata file that no sound manifest names and its payload, if it is not there already.

    Adds the payload's path to `pointed`.
    """
    try:
        meta = read_meta(folder, path)
    except MopdctlError as error:
        story.give_up(folder, path, str(error))
        return None
    payload = str(meta[0]["payload_file"]) if meta else ""
    seen = payload in pointed
    pointed.add(payload)
    fresh = [row for row in meta if row["sample_id"] not in known]
    if seen or not fresh:  # the same samples in other files, before a compaction or after it, or with other scores
        return None
    if not re.fullmatch(r"payload/[^/]+", payload) or not (folder / payload).is_file():
        story.give_up(folder, path, _NO_HALF)
        return None
    pair = [folder / path, folder / payload]
    entries = [File(str(p.relative_to(folder)), p.stat().st_size, file_digest(p)) for p in pair]
    if len(fresh) == len(meta) and all(arrays is not None for _, arrays in check_rows(folder, meta)):
        tokens = sum(row["prompt_length"] + row["response_length"] for row in meta)
        found: Shard | None = Shard(len(meta), tokens, *entries)
    else:
        found = _rescue(folder, entries[1].path, fresh, staging, story)
        story.damaged.extend(pair)
    if found:
        story.notes.append(f"{entries[0].path}: {found.rows} samples that a damaged manifest named are back")
    return found


def _mend_logs(folder: Path, staging: Path, story: _Story) -> list[Path]:
    """Cuts torn tails off; writes what is whole in a damaged log into a new segment. Returns what that replaces."""
    replaced = []
    log_folder = folder / "wal"
    for writer in writers(log_folder):
        try:
            story.notes.extend(recover(log_folder, writer=writer).notes)
            continue
        except InputError:
            raise
        except MopdctlError as error:
            path, what = log_damage(folder, error)
            story.lost.append(f"{path}: {what}; what was logged after that is lost and will be sampled again")
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
        story.notes.append(f"wal: what is whole of {len(found.samples)} samples of {writer} is saved")
        replaced += [log_folder / name for name in found.lengths]
    return replaced


def _put_away(folder: Path, files: Iterable[Path]) -> list[str]:
    places = []
    for path in files:
        if path.exists():
            name = f"{path.parent.name}-{path.name}"
            target = folder / "lost" / name
            number = 1
            while target.exists():  # a log that was removed at the end of a run begins with the same names again
                target = folder / "lost" / f"{name}.{(number := number + 1)}"
            disk.make_folder(target.parent)
            disk.rename(path, target)
            disk.sync_folder(target.parent)
            places.append(str(target.relative_to(folder)))
    return places
