"""Numbered manifests: the one place that says which files are live. A number is given once and never replaced.

A manifest is JSON and carries its own digest and that of the one before it. Readers take file names from the newest
manifest alone, never from a directory listing: no convention for temporary names is respected by every reader.
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mopdctl import __version__
from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import dump_json, fingerprint
from mopdctl.store import disk, schema

KEEP = 3
"""Manifests that stay readable: a reader that opened the last but one still finds its files."""


@dataclass(frozen=True, slots=True)
class File:
    """A file inside the store, as it was when it was committed."""

    path: str
    bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Shard:
    """The samples of one commit: a metadata file and the payload file that its rows point into."""

    rows: int
    tokens: int
    meta: File
    payload: File


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that is in the store at one moment."""

    number: int
    parent: str | None
    """Digest of the manifest before this one."""
    identity: dict[str, Any]
    """What made the samples: tokenizer, model, sampling, prompts. A writer must share it."""
    shards: tuple[Shard, ...]

    @property
    def rows(self) -> int:
        """Samples in the store."""
        return sum(shard.rows for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens in the store, prompts included."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def files(self) -> dict[str, File]:
        """All live files by path."""
        return {file.path: file for shard in self.shards for file in (shard.meta, shard.payload)}


def manifest_path(store: Path, number: int) -> Path:
    """Where manifest `number` lies."""
    return store / "manifest" / f"{number:020d}.json"


def numbers(store: Path) -> list[int]:
    """The numbers of all manifests, ascending, sound or not."""
    found = [re.fullmatch(r"(\d{20})\.json", path.name) for path in (store / "manifest").glob("*.json")]
    return sorted(int(match[1]) for match in found if match)


def encode(manifest: Manifest) -> tuple[bytes, str]:
    """The file's bytes and the digest in them."""
    body = {"schema": schema.NAME, "mopdctl": __version__, **asdict(manifest)}
    digest = fingerprint(body)
    return (dump_json({**body, "digest": digest}) + "\n").encode(), digest


def read(store: Path, number: int) -> tuple[Manifest, str]:
    """One manifest and its digest.

    Raises MopdctlError if it is damaged and InputError if a newer mopdctl wrote it.
    """
    path = manifest_path(store, number)
    try:
        document = json.loads(path.read_bytes())
        digest = document.pop("digest")
        name, _, version = str(document["schema"]).partition("/")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise MopdctlError(f"{path}: not a whole manifest ({type(error).__name__})") from None
    if fingerprint(document) != digest:
        raise MopdctlError(f"{path}: its content does not match its digest")
    if name != "mopdctl.store" or not version.isdecimal() or int(version) > schema.VERSION:
        raise InputError(
            f"{store}: a store of layout {document['schema']}, this mopdctl reads {schema.NAME}; upgrade mopdctl"
        )
    shards = tuple(
        Shard(s["rows"], s["tokens"], meta=File(**s["meta"]), payload=File(**s["payload"])) for s in document["shards"]
    )
    if document["number"] != number:
        raise MopdctlError(f"{path}: says that it is number {document['number']}")
    return Manifest(number, document["parent"], document["identity"], shards), digest


def newest(store: Path) -> tuple[Manifest, str, list[str]]:
    """The newest sound manifest, its digest, and a line for each newer one that is damaged.

    Raises InputError if there is no store, MopdctlError if no manifest in it is sound.
    """
    known = numbers(store)
    if not known:
        raise InputError(f"{store}: no rollout store; make one with `mopdctl rollout`, `rl` or `distill`")
    warnings = []
    for number in reversed(known):
        try:
            manifest, digest = read(store, number)
        except InputError:
            raise
        except MopdctlError as error:
            warnings.append(f"{error}; run `mopdctl store repair`")
        else:
            return manifest, digest, warnings
    raise MopdctlError(f"{store}: no sound manifest; run `mopdctl store repair`\n" + "\n".join(warnings))


def publish(store: Path, manifest: Manifest, staging: Path) -> str:
    """Makes `manifest` the newest; returns its digest.

    Raises MopdctlError if its number is taken by another: someone else has written here. If the number is taken by the
    same bytes, an earlier try had come through and this one has, too.
    """
    data, digest = encode(manifest)
    target = manifest_path(store, manifest.number)
    temporary = staging / target.name
    disk.write_file(temporary, data)
    try:
        disk.publish(temporary, target)
    except FileExistsError:
        if target.read_bytes() != data:
            raise MopdctlError(f"{target}: written by someone else meanwhile; a store has one writer") from None
    disk.sync_folder(target.parent)
    disk.remove(temporary)
    for old in numbers(store)[:-KEEP]:
        disk.remove(manifest_path(store, old))
    return digest
