"""Packing samples into bins of a fixed number of tokens: best-fit decreasing over all of them at once, by histogram.

Best fit puts a sample into the fullest bin that it fits into, and a bin that took it is then the fullest one for the
next sample of its length. So samples of one length go in together: all bins with the same space left are filled alike,
with slices of arrays, and the work grows with the number of distinct lengths, not of samples.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mopdctl.errors import InputError
from mopdctl.files import digest

OverLong = Literal["error", "drop", "alone"]
"""What becomes of a sample that no bin can hold: an error, left out and counted, or a bin of its own."""

_LOW = 32
"""Bits of a sort key that hold a position. Keys are unique, so that no machine's sort can break a tie its own way."""


@dataclass(frozen=True, eq=False)
class Packing:
    """Bins of samples: bin b holds samples `order[offsets[b]:offsets[b + 1]]`, the longest first."""

    order: NDArray[np.int64]
    """Sample numbers, [N], bin after bin."""
    offsets: NDArray[np.int64]
    """Where each bin begins in `order`, and the end, [B + 1]."""
    capacity: int
    """Tokens that a bin holds."""
    tokens: int
    """Tokens of all samples in bins, over-long ones not counted."""
    alone: int
    """Over-long samples, each in a bin of its own."""
    dropped: int
    """Over-long samples left out."""

    @property
    def num_bins(self) -> int:
        """Bins, B."""
        return len(self.offsets) - 1

    @property
    def fill(self) -> float | None:
        """Share of the bins' room that tokens take, None without a bin.

        Alignment counts as empty; over-long samples and their bins do not count.
        """
        bins = self.num_bins - self.alone
        return self.tokens / (bins * self.capacity) if bins else None

    def bin(self, number: int) -> NDArray[np.int64]:
        """The samples of one bin."""
        return self.order[self.offsets[number] : self.offsets[number + 1]]


def pack(
    lengths: ArrayLike,
    capacity: int,
    *,
    seed: int,
    multiple_of: int = 1,
    over_long: OverLong = "error",
    align: int = 1,
    groups: ArrayLike | None = None,
) -> Packing:
    """Packs samples of `lengths` [n] tokens into as many bins as best-fit decreasing takes, in seeded random order.

    Equal lengths are shuffled before and bins after packing: both would otherwise come in the order of the input.

    Args:
        lengths: Tokens of each sample, integers from 1.
        capacity: Tokens that a bin holds.
        seed: Makes the order; it does not change the number of bins.
        multiple_of: The number of bins is made a multiple of this (the data-parallel size) by moving single samples out
            of the fullest bins that hold at least two.
        over_long: What becomes of a sample longer than `capacity`.
        align: A length counts as rounded up to a multiple of this; context parallelism wants `cp * 2 * tp`.
        groups: A small number from 0 for each sample, [n]; samples of different groups share no bin.

    Raises:
        InputError: A length below 1, an over-long sample where that is an error, fewer samples than bins are needed, or
            an argument that makes no sense.
    """
    tokens = _checked(lengths, capacity, multiple_of, over_long, align)
    # whole units of `align`; what the capacity has beyond them, no aligned sample can use
    sizes, room = -(-tokens // align), capacity // align
    fits = sizes <= room
    long = np.flatnonzero(~fits)
    if len(long) and over_long == "error":
        rounded = f", lengths rounded up to a multiple of {align}" if align > 1 else ""
        raise InputError(
            f"{len(long)} of {len(tokens)} samples are longer than the capacity of {capacity} tokens{rounded}; the "
            f"longest has {tokens.max()}: raise the capacity, or say what becomes of them (`drop` or `alone`)"
        )

    generator = _generator(seed)
    shuffled = generator.permutation(np.flatnonzero(fits))
    kept = tokens[shuffled].sum()
    ordered, bin_of, bins = [], [], 0
    for members in _split(shuffled, groups, len(tokens)):
        keys = (-sizes[members] << _LOW) | np.arange(len(members))
        keys.sort()
        members = members[keys & ((1 << _LOW) - 1)]
        found, count = _best_fit(sizes[members], room)
        ordered.append(members)
        bin_of.append(found + bins)
        bins += count
    alone = len(long) if over_long == "alone" else 0
    ordered.append(long[:alone])
    bin_of.append(np.arange(bins, bins + alone))

    samples, labels = np.concatenate(ordered), np.concatenate(bin_of)
    bins = _top_up(labels, sizes[samples], bins + alone, multiple_of)
    labels = generator.permutation(bins)[labels]
    keys = (labels << _LOW) | np.arange(len(labels))
    keys.sort()
    return Packing(
        order=samples[keys & ((1 << _LOW) - 1)],
        offsets=np.concatenate([[0], np.bincount(labels, minlength=bins).cumsum()]),
        capacity=capacity,
        tokens=int(kept),
        alone=alone,
        dropped=len(long) - alone,
    )


def _checked(lengths: ArrayLike, capacity: int, multiple_of: int, over_long: str, align: int) -> NDArray[np.int64]:
    for name, value in (("capacity", capacity), ("multiple_of", multiple_of), ("align", align)):
        if not 1 <= value < 1 << 31:
            raise InputError(f"{name}: {value}; it has to be from 1 to {(1 << 31) - 1}")
    if over_long not in get_args(OverLong):
        raise InputError(f"over_long: {over_long!r}; it has to be one of {', '.join(get_args(OverLong))}")
    found = np.asarray(lengths)
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise InputError(f"lengths: {found.dtype} of shape {found.shape}; whole numbers in one row are needed")
    tokens = found.astype(np.int64, copy=False)
    if bad := int((tokens < 1).sum()):
        number = int(np.argmax(tokens < 1))
        raise InputError(f"lengths: {bad} below 1, first {tokens[number]} of sample {number}; a sample has tokens")
    return tokens


def _generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=int(digest(repr((seed, "packing"))), 16)))


def _split(samples: NDArray[np.int64], groups: ArrayLike | None, total: int) -> list[NDArray[np.int64]]:
    """The samples of each group that has any, their order kept."""
    if groups is None:
        return [samples] if len(samples) else []
    codes = np.asarray(groups)
    if codes.shape != (total,) or (
        total and (codes.dtype.kind not in "iu" or codes.min() < 0 or codes.max() >= 1 << 16)
    ):
        raise InputError(f"groups: {codes.dtype} of shape {codes.shape}; {total} numbers below {1 << 16} are needed")
    codes = codes.astype(np.uint16)[samples]  # 16 bits are sorted by radix, in a tenth of the time
    parts = np.split(samples[np.argsort(codes, kind="stable")], np.bincount(codes).cumsum()[:-1]) if len(codes) else []
    return [part for part in parts if len(part)]


def _best_fit(sizes: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], int]:
    """The bin of each sample, [n], and the number of bins, for descending `sizes` [n], none above `capacity`."""
    bin_of = np.empty(len(sizes), np.int64)
    starts = np.flatnonzero(np.diff(sizes, prepend=0))
    counts = np.diff(starts, append=len(sizes))
    smallest = int(sizes[-1])
    blocks: dict[int, list[NDArray[np.int64]]] = {}  # space left in a bin -> arrays of bins
    spaces: list[int] = []  # the keys of `blocks`, ascending

    def put(space: int, block: NDArray[np.int64]) -> None:
        if space < smallest or not len(block):  # nothing will fit there any more
            return
        if space in blocks:
            blocks[space].append(block)
        else:
            blocks[space] = [block]
            insort(spaces, space)

    at = bins = 0
    for size, left in zip(sizes[starts].tolist(), counts.tolist(), strict=True):
        while left:
            place = bisect_left(spaces, size)
            if place == len(spaces):
                new = -(-left // (capacity // size))
                put(capacity, np.arange(bins, bins + new))
                bins += new
                continue
            space = spaces[place]
            block = blocks[space].pop()
            if not blocks[space]:
                del blocks[space], spaces[place]
            each = space // size
            take = min(len(block), left // each)
            if not take:  # fewer than one bin holds
                take, each = 1, left
            bin_of[at : at + take * each].reshape(take, each)[:] = block[:take, None]
            put(space - each * size, block[:take])
            put(space, block[take:])
            at += take * each
            left -= take * each
    return bin_of, bins


def _top_up(labels: NDArray[np.int64], sizes: NDArray[np.int64], bins: int, multiple_of: int) -> int:
    """Moves single samples into new bins, in place, until the number of bins, which it returns, is a multiple.

    The longest sample moves, so that both bins have work. `labels` and `sizes` [N]: bin and size of each sample, those
    of one bin in descending order.
    """
    missing = -bins % multiple_of
    if bins + missing > len(labels):
        raise InputError(
            f"{len(labels)} samples cannot fill {bins + missing} bins, the next multiple of {multiple_of}; "
            "use more samples or fewer ranks"
        )
    while missing:
        donors = np.flatnonzero(np.bincount(labels) > 1)
        used = np.bincount(labels, weights=sizes)[donors]
        donors = donors[np.argsort(-used, kind="stable")[:missing]]
        first = np.empty(bins, np.int64)
        first[labels[::-1]] = np.arange(len(labels))[::-1]  # of several values for one place, the last stays
        labels[first[donors]] = np.arange(bins, bins + len(donors))
        bins += len(donors)
        missing -= len(donors)
    return bins
