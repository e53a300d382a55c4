"""Matrices cut into blocks of columns: in chunks of bounded memory, checked, and the scale of least error for each."""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.fp4.e2m1 import round_to_values_

_CHUNK = 2**18  # elements a thread works on at a time: few enough for its cache, enough to be worth waking it
_MOST = 2**22  # of all threads together
_GPU_CHUNK = 2**21  # 8 MB a temporary
_INDEX = 15  # bits of an error that the number of a candidate takes the place of


def row_chunks(matrix: Tensor) -> Iterator[slice]:
    """Slices of rows that bound the temporary memory whatever the size of the matrix: at least one row each."""
    rows, columns = matrix.shape
    if matrix.device.type == "cpu":
        _let_malloc_keep_temporaries()
        elements = min(_CHUNK * torch.get_num_threads(), _MOST)
    else:
        elements = _GPU_CHUNK
    step = max(1, elements // max(1, columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


@cache
def _let_malloc_keep_temporaries() -> None:
    """Has glibc keep the memory of freed temporaries for the next ones, up to 64 MiB: on two cores 1.7 times as fast.

    Else it returns their pages to the system each time, and gets them back one fault after the other. It keeps twice
    the largest block that it has mapped and freed, of up to 32 MiB: mallopt(3), M_MMAP_THRESHOLD. This one is not
    touched, so it costs nothing.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)


def check_blocks(weight_RK: Tensor, block: int) -> None:
    """Passes a matrix of floats of which every row falls into whole blocks.

    Raises:
        InputError: for anything else.
    """
    if weight_RK.dim() != 2 or not weight_RK.is_floating_point():
        raise InputError(f"{weight_RK.dtype} of shape {list(weight_RK.shape)}: quantize a matrix of floats")
    if weight_RK.shape[1] % block:
        raise InputError(
            f"width {weight_RK.shape[1]}: blocks take a multiple of {block}; leave this weight in high precision"
        )


def largest_magnitude(matrix: Tensor) -> float:
    """The largest magnitude, 0 of an empty matrix; NaN or infinite if a value is."""
    if not matrix.numel():
        return 0.0
    least, largest = torch.aminmax(matrix)
    return float(torch.maximum(-least, largest))


def check_finite(amax: Tensor) -> Tensor:
    """Passes largest magnitudes on if all are finite.

    Raises:
        InputError: if a weight was NaN or infinite.
    """
    broken = int((~torch.isfinite(amax)).sum())
    if broken:
        raise InputError(f"NaN or infinite weights, in {broken} of these {amax.numel()} blocks: no scale fits them")
    return amax


def block_magnitudes(rows: Tensor, block: int) -> Tensor:
    """Magnitudes [B, r, K/B] of rows [r, K], float32: the n-th columns of all blocks lie side by side.

    What is summed or compared within blocks is then done on long rows, many blocks at a time.
    """
    r, columns = rows.shape
    by_column = torch.empty(block, r, columns // block, dtype=torch.float32, device=rows.device)
    return by_column.copy_(rows.reshape(r, -1, block).permute(2, 0, 1)).abs_()


def importance_of_columns(importance_K: Tensor, columns: int, block: int) -> Tensor:
    """Weights [B, 1, K/B] of squared errors, the largest of them 1, laid out as `block_magnitudes`.

    Raises:
        InputError: unless there is one for each column, all are finite and none is negative.
    """
    if importance_K.shape != (columns,):
        raise InputError(f"importance of columns: shape {list(importance_K.shape)}, and the weight has {columns}")
    importance_K = importance_K.float()
    if not bool((torch.isfinite(importance_K) & (importance_K >= 0)).all()):
        raise InputError("importance of columns: must be finite and not negative; check the calibration's activations")
    largest = importance_K.max().clamp(min=torch.finfo(torch.float32).tiny)
    return (importance_K / largest).view(-1, block).t().unsqueeze(1).contiguous()


def least_error(magnitudes: Tensor, amax: Tensor, steps: Tensor, importance: Tensor | None) -> Tensor:
    """Which of up to 16 step sizes rounds each block with the least squared error, the first of equals.

        error_c = sum_j importance_j (step_c E2M1(w_j / step_c) - w_j)^2 / amax^2

    Magnitudes of 1e30 or 1e-30 have squares beyond float32: hence the division. Errors within 2^-19 of each other count
    as equal. No step of it rounds otherwise on another device, so that all choose the same.

    Args:
        magnitudes: [B, r, n], from `block_magnitudes`; overwritten.
        amax: [r, n], the largest in each block.
        steps: [C, r, n], what a code of value 1 would stand for.
        importance: [B, 1, n] or None.

    Returns:
        int64 [r, n], below C.
    """
    unit = amax.masked_fill(amax == 0, 1.0)
    scaled = magnitudes.div_(unit)
    # Beyond 2^40 on either side everything rounds to zero, or saturates, all the same.
    steps = (steps / unit).clamp_(2.0**-40, 2.0**40)
    inverse = steps.reciprocal()
    errors = torch.empty_like(steps)
    for c in range(len(steps)):
        rounded = round_to_values_(scaled * inverse[c])
        squares = rounded.mul_(steps[c]).sub_(scaled).square_()
        errors[c] = _sum_by_halves_(squares if importance is None else squares.mul_(importance))
    # Floats that are not negative are ordered as their bits, so one minimum finds error and candidate at once.
    keys = errors.view(torch.int32).bitwise_and_(~_INDEX)
    keys.add_(torch.arange(len(steps), dtype=torch.int32, device=keys.device).view(-1, 1, 1))
    return keys.amin(0).bitwise_and_(_INDEX).long()


def _sum_by_halves_(values: Tensor) -> Tensor:
    """The sums [...] of values [2^n, ...], which are overwritten: in one order of additions, whatever the device."""
    while len(values) > 1:
        half = len(values) // 2
        values = values[:half].add_(values[half:])
    return values[0]
