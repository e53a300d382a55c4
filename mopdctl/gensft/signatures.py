"""What is kept of each text to find its duplicates: a digest, 120 minima over its shingles, and 20 keys of those."""

import re
import unicodedata
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from mopdctl.files import digest

BANDS, _BAND_ROWS = 20, 6
PERMUTATIONS = BANDS * _BAND_ROWS
"""Minima of a signature, six for each band."""

SIGNATURES, DIGESTS, KEYS = "signatures.u32", "exact.bin", "band-{:02d}.u64"
"""Names of the files that a `SignatureWriter` writes, the last with the number of a band."""

# Unspaced scripts (kana, Han) have no words to run over, so each of their characters is one.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
# Marks that a rewrite sprinkles about. All others count, or `3 + 4` and `3 - 4` would be the same row.
_PUNCTUATION = ".,;:!?'\"\u00a1\u00ab\u00bb\u00bf\u2018-\u201f\u2039\u203a\u3001\u3002\u300c-\u300f"
_WORD = re.compile(rf"[^\W{_UNSPACED}]+|[{_UNSPACED}]|[^\w\s{_PUNCTUATION}]+")
_ASCII_WORD = re.compile(r"[a-z0-9_]+|[^a-z0-9_\s.,;:!?'\"]+")  # finds the same in normalised ASCII, twice as fast

_MIX = np.uint64(0x9E3779B97F4A7C15)
_RANDOM = np.random.Generator(np.random.PCG64(20260101))
_FACTORS = _RANDOM.integers(0, 1 << 31, PERMUTATIONS, dtype=np.uint32) * np.uint32(2) + np.uint32(1)  # odd: one to one
_OFFSETS = _RANDOM.integers(0, 1 << 32, PERMUTATIONS, dtype=np.uint32)
_HIGHEST = np.full(PERMUTATIONS, 0xFFFFFFFF, dtype=np.uint32)


def normalised(text: str) -> str:
    """The text in NFKC, without case, its runs of whitespace one space, trimmed."""
    return " ".join(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).split())


def text_digest(text: str) -> str:
    """The 16-byte digest, in hex, of the normalised text: equal for exact duplicates."""
    return _digest(normalised(text))


def shingles(text: str, *, words: int = 3) -> NDArray[np.uint64]:
    """The hashes of all runs of `words` words in the normalised text, sorted, each once; never empty.

    Words are runs of letters and digits, single kana and Han characters, and runs of signs such as `+`, `==` or emoji;
    the punctuation of sentences is left out. A text of fewer words is one shingle, itself, so that short and wordless
    texts are alike only when they are the same.
    """
    return _shingles(normalised(text), words)


def jaccard(left: NDArray[np.uint64], right: NDArray[np.uint64]) -> float:
    """The share of shingles that two texts have in common, 0 to 1, from what `shingles` returned."""
    common = len(np.intersect1d(left, right, assume_unique=True))
    return common / (len(left) + len(right) - common)


class SignatureWriter:
    """Writes what `find_duplicates` needs to know of each text, in the order of `add`; a context manager.

    `folder` gets `signatures.u32` (480 bytes a row), `exact.bin` (16) and `band-00.u64` to `band-19.u64` (8 each), all
    little-endian. Files of an earlier run are replaced. Memory does not grow with the number of rows.
    """

    _BUFFER = 1024  # rows

    def __init__(self, folder: Path, *, words: int = 3) -> None:
        self._folder = folder
        self._words = words
        self._files = ExitStack()
        self._digests: list[str] = []
        self._signatures: list[NDArray[np.uint32]] = []

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._signature_file = self._open(self._folder / SIGNATURES)
        self._digest_file = self._open(self._folder / DIGESTS)
        self._band_files = [self._open(self._folder / KEYS.format(band)) for band in range(BANDS)]
        return self

    def add(self, text: str) -> None:
        """Appends one row."""
        normal = normalised(text)
        self._digests.append(_digest(normal))
        self._signatures.append(_signature(_shingles(normal, self._words)))
        if len(self._digests) == self._BUFFER:
            self._flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._files:
            self._flush()

    def _open(self, path: Path) -> BinaryIO:
        return self._files.enter_context(path.open("wb"))

    def _flush(self) -> None:
        if not self._digests:
            return
        signatures = np.stack(self._signatures).astype("<u4")
        in_bands = signatures.reshape(-1, BANDS, _BAND_ROWS).astype(np.uint64)
        keys = _fold([in_bands[:, :, column] for column in range(_BAND_ROWS)]).astype("<u8")
        self._signature_file.write(signatures.tobytes())
        self._digest_file.write(bytes.fromhex("".join(self._digests)))
        for band, file in enumerate(self._band_files):
            file.write(keys[:, band].tobytes())
        self._digests, self._signatures = [], []


def _digest(normal: str) -> str:
    return digest(normal.encode("utf-8", "surrogatepass"))


def _shingles(normal: str, words: int) -> NDArray[np.uint64]:
    found = (_ASCII_WORD if normal.isascii() else _WORD).findall(normal)
    if len(found) < words:
        return np.array([xxh3_64_intdigest(normal.encode("utf-8", "surrogatepass"))], dtype=np.uint64)
    encoded = "\n".join(found).encode("utf-8", "surrogatepass").split(b"\n")  # no word holds a line break
    hashes = np.fromiter(map(xxh3_64_intdigest, encoded), np.uint64, len(found))
    count = len(found) - words + 1
    values = _fold([hashes[start : start + count] for start in range(words)])
    values.sort()
    return values[np.concatenate(([True], values[1:] != values[:-1]))]


def _signature(values: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """The 120 minima of `values` under `factor * value + offset` modulo 2^32; the values are hashes already."""
    high = (values >> np.uint64(32)).astype(np.uint32)
    minima = _HIGHEST
    for start in range(0, len(high), 1024):  # a long text stays in the processor's cache
        permuted = np.multiply.outer(high[start : start + 1024], _FACTORS)
        permuted += _OFFSETS
        minima = np.minimum(minima, permuted.min(axis=0))
    return minima


def _fold(parts: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """One hash for each position of several arrays of one shape; their order matters."""
    total = parts[0]
    for part in parts[1:]:
        total = total * _MIX + part
    return total
