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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mopdctl.errors import InputError
from mopdctl.gensft.signatures import BANDS, DIGESTS, KEYS, PERMUTATIONS, SIGNATURES, jaccard, shingles

_MIN_THRESHOLD = 0.6  # where six pairs in ten share a band; below it the bands would miss most of what is asked for

# In each band a row meets at most so many rows of its bucket, those just before it (samples of one prompt are
# neighbours), and the one of them that looks most alike is compared in full. So work grows with rows, not pairs.
_WINDOW = 50
_BLOCK = 256  # rows of a band that are looked at together


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
    paths = [(folder / SIGNATURES, 4 * PERMUTATIONS), (folder / DIGESTS, 16)]
    for path, size in paths + [(folder / KEYS.format(band), 8) for band in range(BANDS)]:
        if path.stat().st_size != size * rows:
            raise ValueError(f"{path}: {path.stat().st_size} bytes where {rows} rows take {size * rows}")
    if not 0 <= prior <= rows:
        raise ValueError(f"prior {prior} of {rows} rows")

    row = np.arange(rows)
    first = _first_with_same_text(np.fromfile(folder / DIGESTS, "<u8").reshape(-1, 2))
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
    standard_error = (threshold * (1 - threshold) / PERMUTATIONS) ** 0.5  # of the share of equal minima
    least = threshold - 3 * standard_error
    for band in range(BANDS):
        for lefts, rights in _bucket_pairs(np.fromfile(folder / KEYS.format(band), "<u8"), texts, prior):
            apart = groups.roots(lefts) != groups.roots(rights)
            lefts, rights = lefts[apart], rights[apart]
            # Mapped anew each time, so that the pages read do not stay in this process.
            signatures = np.memmap(folder / SIGNATURES, "<u4", mode="r").reshape(-1, PERMUTATIONS)
            equal = (signatures[lefts] == signatures[rights]).sum(axis=1, dtype=np.int16)
            order = np.lexsort((-equal, rights))
            best = order[(_place_in_run(rights[order]) == 0) & (equal[order] >= least * PERMUTATIONS)]
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
