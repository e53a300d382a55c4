"""Exact and near duplicates among rows of text, in memory that does not grow with the texts.

```
text -> normalised -> shingles -> 120 minima -> 20 bands of 6     files, 656 bytes a row
rows in the same bucket of a band -> share of equal minima -> Jaccard of their shingles -> groups
```

Two texts of Jaccard similarity J share a band with probability J^6, so at least one with 1 - (1 - J^6)^20: 0.92 at
J = 0.7, 0.998 at 0.8, and 0.04 at 0.35. Buckets only propose: two rows count as alike when the similarity of their full
shingle sets says so. Whatever is alike through others (A to B, B to C) is one group, and a group keeps one row.
Source: Broder 1997, "On the resemblance and containment of documents"; Leskovec, Rajaraman and Ullman, chapter 3.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from mopdctl.errors import InputError
from mopdctl.files import digest

_BANDS, _BAND_ROWS = 20, 6
_PERMUTATIONS = _BANDS * _BAND_ROWS
_MIN_THRESHOLD = 0.6  # where six pairs in ten share a band; below it the bands would miss most of what is asked for

_SIGNATURES, _DIGESTS, _KEYS = "signatures.u32", "exact.bin", "band-{:02d}.u64"

# In each band a row meets at most so many rows of its bucket, those just before it (samples of one prompt are
# neighbours), and the one of them that looks most alike is compared in full. So work grows with rows, not pairs.
_WINDOW = 50
_BLOCK = 256  # rows of a band that are looked at together

# Unspaced scripts (kana, Han) have no words to run over, so each of their characters is one.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
# Marks that a rewrite sprinkles about. All others count, or `3 + 4` and `3 - 4` would be the same row.
_PUNCTUATION = ".,;:!?'\"\u00a1\u00ab\u00bb\u00bf\u2018-\u201f\u2039\u203a\u3001\u3002\u300c-\u300f"
_WORD = re.compile(rf"[^\W{_UNSPACED}]+|[{_UNSPACED}]|[^\w\s{_PUNCTUATION}]+")
_ASCII_WORD = re.compile(r"[a-z0-9_]+|[^a-z0-9_\s.,;:!?'\"]+")  # finds the same in normalised ASCII, twice as fast

_MIX = np.uint64(0x9E3779B97F4A7C15)
_RANDOM = np.random.Generator(np.random.PCG64(20260101))
_FACTORS = _RANDOM.integers(0, 1 << 31, _PERMUTATIONS, dtype=np.uint32) * np.uint32(2) + np.uint32(1)  # odd: one to one
_OFFSETS = _RANDOM.integers(0, 1 << 32, _PERMUTATIONS, dtype=np.uint32)
_HIGHEST = np.full(_PERMUTATIONS, 0xFFFFFFFF, dtype=np.uint32)


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
        self._signature_file = self._open(self._folder / _SIGNATURES)
        self._digest_file = self._open(self._folder / _DIGESTS)
        self._band_files = [self._open(self._folder / _KEYS.format(band)) for band in range(_BANDS)]
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
        in_bands = signatures.reshape(-1, _BANDS, _BAND_ROWS).astype(np.uint64)
        keys = _fold([in_bands[:, :, column] for column in range(_BAND_ROWS)]).astype("<u8")
        self._signature_file.write(signatures.tobytes())
        self._digest_file.write(bytes.fromhex("".join(self._digests)))
        for band, file in enumerate(self._band_files):
            file.write(keys[:, band].tobytes())
        self._digests, self._signatures = [], []


@dataclass(frozen=True, slots=True)
class Pair:
    """Why a row went: `row` is like `alike`, to the Jaccard `similarity`, and in one group with `kept`.

    `alike` is not `kept` where the two are alike only through others, or where no one compared them.
    """

    row: int
    kept: int
    alike: int
    similarity: float


@dataclass(frozen=True, slots=True, eq=False)
class Duplicates:
    """The groups of duplicates among n rows, prior rows first.

    Each new row is kept or counted once: `keep.sum() + exact + near + against` is their number.

    Attributes:
        keep: (n,) the new rows to keep; False for every prior row.
        root: (n,) the row that stands for the group: the kept one, or the first prior row. `root[root] == root`.
        alike: (n,) a row that this one was found to be like, -1 for rows that are kept or prior.
        similarity: (n,) the Jaccard similarity to `alike`, 1 for the same text, NaN where `alike` is -1.
        exact: rows dropped because the kept row has the same normalised text.
        near: rows dropped because they are like the kept row, directly or through others.
        against: rows dropped because their group holds a prior row, the same or alike.
    """

    keep: NDArray[np.bool_]
    root: NDArray[np.int64]
    alike: NDArray[np.int64]
    similarity: NDArray[np.float64]
    exact: int
    near: int
    against: int

    def pairs(self) -> Iterator[Pair]:
        """The evidence for each dropped row, in the order of rows."""
        for row in np.flatnonzero(self.alike >= 0).tolist():
            yield Pair(row, int(self.root[row]), int(self.alike[row]), float(self.similarity[row]))


def find_duplicates(
    folder: Path,
    text_of: Callable[[int], str],
    *,
    scores: NDArray[np.float64],
    threshold: float | None = 0.7,
    prior: int = 0,
    words: int = 3,
) -> Duplicates:
    """Groups the rows that a `SignatureWriter` wrote to `folder` and picks the row that each group keeps.

    The result depends on the texts, their order and the scores alone. Memory is about 150 bytes a row.

    Args:
        folder: where the writer wrote.
        text_of: the text of a row, as it was added; called only for rows that may be near duplicates.
        scores: (n,) one per row, NaN for none. A group keeps its best; a number beats none, the first row wins a tie.
        threshold: the least Jaccard similarity of near duplicates, 0.6 to 1; None for exact duplicates alone.
        prior: how many rows, the first ones, are only there to compare with: a group with one of them keeps none.
        words: the length of a shingle in words, the same as the writer's.

    Raises:
        InputError: if the threshold is out of range.
        ValueError: if the files do not hold one entry for each score.
    """
    if threshold is not None and not _MIN_THRESHOLD <= threshold <= 1:
        raise InputError(f"dedup threshold {threshold}: give a similarity from {_MIN_THRESHOLD} to 1")
    rows = len(scores)
    paths = [(folder / _SIGNATURES, 4 * _PERMUTATIONS), (folder / _DIGESTS, 16)]
    for path, size in paths + [(folder / _KEYS.format(band), 8) for band in range(_BANDS)]:
        if path.stat().st_size != size * rows:
            raise ValueError(f"{path}: {path.stat().st_size} bytes where {rows} rows take {size * rows}")
    if not 0 <= prior <= rows:
        raise ValueError(f"prior {prior} of {rows} rows")

    row = np.arange(rows)
    first = _first_with_same_text(np.fromfile(folder / _DIGESTS, "<u8").reshape(-1, 2))
    groups = _Groups(first.copy())
    if threshold is not None:
        _join_near(folder, groups, text_of, threshold=threshold, prior=prior, words=words)
    root = _representatives(groups.roots(row), scores, prior)
    new = row >= prior
    keep = new & (root == row)
    dropped = new & ~keep
    against = new & (root < prior)
    # The evidence: the representative or a prior row where it has the same text, else what the text was joined with.
    same = first == first[root]
    twin = np.where(same, root, np.where(first < prior, first, -1))
    alike = np.where(twin >= 0, twin, groups.alike[first])
    alike = np.where(first[alike] == first[root], root, alike)  # of rows with the same text, the representative
    similarity = np.where(twin >= 0, 1.0, groups.similarity[first])
    return Duplicates(
        keep=keep,
        root=root,
        alike=np.where(dropped, alike, -1),
        similarity=np.where(dropped, similarity, np.nan),
        exact=int((dropped & ~against & same).sum()),
        near=int((dropped & ~against & ~same).sum()),
        against=int(against.sum()),
    )


class _Groups:
    """Union-find over rows, with one row and similarity for each that was joined as evidence."""

    def __init__(self, parent: NDArray[np.int64]) -> None:
        self._parent = parent
        self.alike = np.full(len(parent), -1, dtype=np.int64)
        self.similarity = np.full(len(parent), np.nan)

    def root(self, row: int) -> int:
        parent = self._parent
        while (above := int(parent[row])) != row:
            parent[row] = row = int(parent[above])
        return row

    def roots(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        while not np.array_equal(above := self._parent[rows], rows):
            rows = above
        return rows

    def join(self, left: int, right: int, similarity: float) -> None:
        low, high = sorted((self.root(left), self.root(right)))
        self._parent[high] = low
        for row, other in ((left, right), (right, left)):
            if self.alike[row] < 0:
                self.alike[row], self.similarity[row] = other, similarity


def _join_near(
    folder: Path, groups: _Groups, text_of: Callable[[int], str], *, threshold: float, prior: int, words: int
) -> None:
    @lru_cache(maxsize=512)  # a block and the windows before it
    def shingles_of(row: int) -> NDArray[np.uint64]:
        return shingles(text_of(row), words=words)

    texts = np.unique(groups.roots(np.arange(len(groups.alike))))  # one row for each different text
    standard_error = (threshold * (1 - threshold) / _PERMUTATIONS) ** 0.5  # of the share of equal minima
    least = threshold - 3 * standard_error
    for band in range(_BANDS):
        for lefts, rights in _bucket_pairs(np.fromfile(folder / _KEYS.format(band), "<u8"), texts, prior):
            apart = groups.roots(lefts) != groups.roots(rights)
            lefts, rights = lefts[apart], rights[apart]
            # Mapped anew each time, so that the pages read do not stay in this process.
            signatures = np.memmap(folder / _SIGNATURES, "<u4", mode="r").reshape(-1, _PERMUTATIONS)
            equal = (signatures[lefts] == signatures[rights]).sum(axis=1, dtype=np.int16)
            order = np.lexsort((-equal, rights))
            best = order[(_place_in_run(rights[order]) == 0) & (equal[order] >= least * _PERMUTATIONS)]
            for left, right in zip(lefts[best].tolist(), rights[best].tolist(), strict=True):
                if groups.root(left) == groups.root(right):
                    continue
                similarity = jaccard(shingles_of(left), shingles_of(right))
                if similarity >= threshold:
                    groups.join(left, right, similarity)


def _bucket_pairs(
    keys: NDArray[np.uint64], texts: NDArray[np.int64], prior: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yields blocks of (earlier rows, later rows) of `texts` with equal keys, the later ones new."""
    order = np.argsort(keys[texts], kind="stable")
    texts = texts[order]
    place = _place_in_run(keys[texts])
    later = np.flatnonzero((place > 0) & (texts >= prior))
    for start in range(0, len(later), _BLOCK):
        block = later[start : start + _BLOCK]
        counts = np.minimum(place[block], _WINDOW)
        rights = np.repeat(block, counts)
        back = 1 + np.arange(len(rights)) - np.repeat(np.cumsum(counts) - counts, counts)
        yield texts[rights - back], texts[rights]


def _representatives(group: NDArray[np.int64], scores: NDArray[np.float64], prior: int) -> NDArray[np.int64]:
    """For each row, the row that its group keeps: a prior one, else the best score; the first of equals."""
    rank = np.where(np.arange(len(group)) < prior, 0, np.where(np.isnan(scores), 2, 1))
    order = np.lexsort((np.where(rank == 1, -scores, 0.0), rank, group))
    places = np.arange(len(group)) - _place_in_run(group[order])
    root = np.empty_like(group)
    root[order] = order[places]
    return root


def _first_with_same_text(digests: NDArray[np.uint64]) -> NDArray[np.int64]:
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    same = (digests[order[1:]] == digests[order[:-1]]).all(axis=1)
    runs = np.cumsum(np.concatenate(([0], ~same)))[: len(order)]
    first = np.empty(len(order), dtype=np.int64)
    first[order] = order[np.arange(len(order)) - _place_in_run(runs)]
    return first


def _place_in_run(values: NDArray[np.int64] | NDArray[np.uint64]) -> NDArray[np.int64]:
    """How many equal values stand directly before each."""
    index = np.arange(len(values))
    begins = np.ones(len(values), dtype=bool)
    begins[1:] = values[1:] != values[:-1]
    return index - np.maximum.accumulate(np.where(begins, index, 0))


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
