"""The order in which rows are used: a seeded shuffle per epoch, so that the step alone says which rows come next."""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mopdctl.engines.base import stream_seed


def rows_of_step(step: int, *, num_rows: int, batch_size: int, seed: int) -> list[int]:
    """Row numbers of optimizer step `step` (from 0). Every row is used once before any is used again."""
    first = step * batch_size
    return [int(_permutation(num_rows, i // num_rows, seed)[i % num_rows]) for i in range(first, first + batch_size)]


def draw_mixture(count: int, sizes: Sequence[int], weights: Sequence[float], seed: int) -> NDArray[np.int64]:
    """The first `count` rows of a mixture, [count]: row numbers over all its parts laid end to end.

    Parts take turns in proportion to their weights: the j-th row of a part is due at (j + 1/2) / weight. Each part uses
    every row once before any again, a single part as in `rows_of_step`. A longer draw begins with a shorter one.
    """
    due, rows = [], []
    for part, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        share = weight / sum(weights)
        # the last row taken is due at most half a turn of every part after `count`
        enough = math.ceil(count * share) + len(sizes) + 1
        part_seed = seed if part == 0 else stream_seed(seed, "part", part)
        epochs = [_permutation(size, epoch, part_seed) for epoch in range(-(-enough // size))]
        rows.append(np.concatenate(epochs)[:enough] + sum(sizes[:part]))
        due.append((np.arange(enough) + 0.5) / share)
    first = np.argsort(np.concatenate(due), kind="stable")[:count]
    return np.concatenate(rows)[first]


@lru_cache(maxsize=4)
def _permutation(num_rows: int, epoch: int, seed: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.Philox(key=stream_seed(seed, "order", epoch))).permutation(num_rows)
