"""Safetensors files of known size, written tensor by tensor in any order: each has its place before there is any."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from mopdctl.engines.weights import DTYPES, Place, StoredTensors
from mopdctl.files import write_json

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Stored:
    """Dtype and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file: its name, its header, and the byte at which each of its tensors begins."""

    file: str
    header: bytes
    starts: dict[str, int]
    num_bytes: int


def lay_out(tensors: Mapping[str, Stored], *, max_bytes: int) -> list[Shard]:
    """Puts tensors into files of at most `max_bytes` (or one tensor), in their order.

    Within a file the widest dtypes come first, so that each tensor is aligned. The same tensors give the same bytes.
    """
    files: list[dict[str, Stored]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if files[-1] and size + tensor.num_bytes > max_bytes:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.num_bytes
    if len(files) == 1:
        return [_shard("model.safetensors", files[0])]
    return [_shard(f"model-{i:05}-of-{len(files):05}.safetensors", one) for i, one in enumerate(files, start=1)]


def _shard(file: str, tensors: Mapping[str, Stored]) -> Shard:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, at = {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        offsets[name] = at
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.num_bytes],
        }
        at += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # what follows begins at a multiple of 8
    whole = len(text).to_bytes(8, "little") + text
    return Shard(file, whole, {name: len(whole) + offset for name, offset in offsets.items()}, len(whole) + at)


def index(shards: Iterable[Shard], tensors: Mapping[str, Stored]) -> dict[str, object]:
    """The document of `model.safetensors.index.json`."""
    places = {name: shard.file for shard in shards for name in shard.starts}
    total = sum(tensor.num_bytes for tensor in tensors.values())
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}


class Parts:
    """The files of one checkpoint while they are being filled."""

    def __init__(self, folder: Path, tensors: Mapping[str, Stored], *, max_bytes: int) -> None:
        """Makes those files that are not there yet, with their headers and full size; a hole is no bytes on disk."""
        self.folder, self.tensors = folder, dict(tensors)
        self.shards = lay_out(tensors, max_bytes=max_bytes)
        self._places = {name: (shard.file, start) for shard in self.shards for name, start in shard.starts.items()}
        folder.mkdir(parents=True, exist_ok=True)
        for shard in self.shards:
            path = folder / shard.file
            if path.exists() and path.stat().st_size == shard.num_bytes:
                continue
            with path.open("wb") as file:
                file.write(shard.header)
                file.truncate(shard.num_bytes)

    def write(self, name: str, pieces: Iterable[Tensor]) -> str:
        """Writes a tensor, whole or as pieces of rows that follow each other; returns the digest of its bytes."""
        stored, (file, start) = self.tensors[name], self._places[name]
        state = hashlib.blake2b(digest_size=16)
        with (self.folder / file).open("r+b") as opened:
            opened.seek(start)
            for piece in pieces:
                if piece.dtype != stored.dtype or piece.shape[1:] != stored.shape[1:]:
                    raise AssertionError(f"{name}: {piece.dtype} {list(piece.shape)} where {stored} was laid out")
                data = piece.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
                opened.write(data)
                state.update(data)
            if opened.tell() != start + stored.num_bytes:
                raise AssertionError(f"{name}: {opened.tell() - start} bytes where {stored} was laid out")
        return state.hexdigest()

    def place_in(self, folder: Path) -> None:
        """Puts the files and their index into a folder, as the same bytes under another name.

        None leaves its place, so that a run that is killed here finds them again.
        """
        for shard in self.shards:
            try:
                os.link(self.folder / shard.file, folder / shard.file)
            except OSError:  # a file system without hard links
                shutil.copyfile(self.folder / shard.file, folder / shard.file)
        if len(self.shards) > 1:
            write_json(folder / "model.safetensors.index.json", index(self.shards, self.tensors))

    def stored(self) -> StoredTensors:
        """The tensors to read; those that are not written yet hold zeros."""
        return StoredTensors(
            str(self.folder),
            {
                name: Place(self.folder / file, start, self.tensors[name].dtype, self.tensors[name].shape)
                for name, (file, start) in self._places.items()
            },
        )

    def digest(self, name: str) -> str:
        """The digest of what lies in a tensor's place."""
        left, (file, start) = self.tensors[name].num_bytes, self._places[name]
        state = hashlib.blake2b(digest_size=16)
        with (self.folder / file).open("rb") as opened:
            opened.seek(start)
            while left and (piece := opened.read(min(left, 1 << 24))):
                state.update(piece)
                left -= len(piece)
        return state.hexdigest()
