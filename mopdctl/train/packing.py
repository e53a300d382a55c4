"""Best-fit packing of conversations in the order in which they are drawn.

`mopdctl.store.packing` packs everything that there is at once. Here rows come from a mixture without end, one after
another, and rows with the same prompt stay apart; so a bounded number of packs is open at a time.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopdctl.engines.base import stream_seed

_OPEN = 512
"""Packs that are open at a time. More fill a little better; the fullest is closed when there are too many."""


@dataclass(frozen=True, slots=True)
class Packs:
    """Groups of rows: group g holds `rows[offsets[g]:offsets[g + 1]]`."""

    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def group(self, number: int) -> NDArray[np.int64]:
        """The rows of one group."""
        return self.rows[self.offsets[number] : self.offsets[number + 1]]


def pack_rows(
    order: NDArray[np.int64],
    lengths: NDArray[np.int64],
    prompts: NDArray[np.uint64],
    *,
    capacity: int,
    num_packs: int,
    seed: int,
) -> Packs | None:
    """Puts rows into `num_packs` packs of at most `capacity` tokens, none cut, none with the same prompt twice in one.

    Rows are taken in order until one needs a pack more. Each goes into the fullest pack that it fits into.

    Args:
        order: Row numbers as drawn; the same row may come again, [draws].
        lengths: Tokens of each row, at most `capacity`, [rows].
        prompts: A digest of each row's prompt, [rows].
        capacity: Tokens that a pack holds.
        num_packs: Packs to make.
        seed: Shuffles the packs.

    Returns:
        The packs, or None if `order` ends before they are full.
    """
    smallest = int(lengths[order].min())
    spaces: list[tuple[int, int]] = []  # (space left, pack) of the open packs, ascending
    inside: dict[int, set[int]] = {}  # open pack -> prompts in it
    pack_of = np.empty(len(order), np.int64)
    opened = 0
    for at, (length, prompt) in enumerate(zip(lengths[order].tolist(), prompts[order].tolist(), strict=True)):
        place = bisect_left(spaces, (length, -1))
        while place < len(spaces) and prompt in inside[spaces[place][1]]:
            place += 1
        if place < len(spaces):
            space, pack = spaces.pop(place)
        elif opened < num_packs:
            space, pack = capacity, opened
            inside[pack] = set()
            opened += 1
        else:
            return _shuffled(order[:at], pack_of[:at], num_packs, seed)
        pack_of[at] = pack
        inside[pack].add(prompt)
        if space - length >= smallest:
            insort(spaces, (space - length, pack))
        else:
            del inside[pack]
        if len(spaces) > _OPEN:
            del inside[spaces.pop(0)[1]]
    return None


def _shuffled(rows: NDArray[np.int64], pack_of: NDArray[np.int64], num_packs: int, seed: int) -> Packs:
    generator = np.random.Generator(np.random.Philox(key=stream_seed(seed, "packs")))
    labels = generator.permutation(num_packs)[pack_of]
    counts = np.bincount(labels, minlength=num_packs)
    return Packs(rows[np.argsort(labels, kind="stable")], np.concatenate([[0], counts.cumsum()]))
