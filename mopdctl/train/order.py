"""The order in which rows are used: a seeded shuffle per epoch, so that the step alone says which rows come next."""

from functools import lru_cache

import numpy as np

from mopdctl.engines.base import stream_seed


def rows_of_step(step: int, *, num_rows: int, batch_size: int, seed: int) -> list[int]:
    """Row numbers of optimizer step `step` (from 0). Every row is used once before any is used again."""
    first = step * batch_size
    return [int(_permutation(num_rows, i // num_rows, seed)[i % num_rows]) for i in range(first, first + batch_size)]


@lru_cache(maxsize=4)
def _permutation(num_rows: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=stream_seed(seed, "order", epoch))).permutation(num_rows)
