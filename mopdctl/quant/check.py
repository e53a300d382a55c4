"""What a quantized checkpoint has to be, checked on the bytes of its folder, whoever wrote them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite, prod
from pathlib import Path

import torch
from torch import Tensor

from mopdctl.engines.fp4 import Precision, StoredModule, divisor_of, stored_modules
from mopdctl.engines.fusing import fused_groups
from mopdctl.engines.weights import StoredTensors, open_tensors
from mopdctl.errors import CheckFailedError
from mopdctl.files import read_json
from mopdctl.fp4.fp8 import quantize_fp8_with
from mopdctl.fp4.quantized import BLOCK, quantize_with
from mopdctl.quant.check_config import check_config

_CHUNK_BYTES = 1 << 22
_KINDS = frozenset(
    [
        "weight_packed",
        "weight_scale",
        "weight_global_scale",
        "input_global_scale",
        "weight_scale_2",
        "input_scale",
        "weight_shape",
        "weight_zero_point",
    ]
)
"""Last names of tensors that belong to a quantized matrix."""

_CACHE = (".k_scale", ".v_scale")
_LEAST_TOP = 192.0
"""Of the largest block scale: some kernels take for granted that the highest bit of its exponent is set."""
_MOST_DIVISOR = 2.0**126
"""Where a divisor ends, and with it the reach of the block scales of very small weights."""


def check_checkpoint(
    folder: Path,
    *,
    source: StoredTensors | None = None,
    tied: Mapping[str, str] | None = None,
    rounded: bool = True,
    fused: Sequence[Sequence[str]] = (),
) -> None:
    """Reads every byte of a quantized checkpoint.

    Checked are scales (none NaN, tensor scales positive and finite and shared by what engines fuse, block scales in the
    upper part of their range), shapes, and that configuration and tensors say the same of each matrix.

    Args:
        folder: the checkpoint.
        source: what it was made of; then nothing of that may be missing, what was not quantized is the same to the
            byte, and codes are those that its weights have with the stored scales.
        tied: tensors of the source that are rightly missing.
        rounded: each weight was rounded to the nearest code; GPTQ does otherwise.
        fused: families of layers that an engine fuses, beside the known ones.

    Raises:
        CheckFailedError: naming the first tensor that is wrong, and how.
    """
    tensors = open_tensors(str(folder))
    modules = stored_modules(tensors)
    for problem in _problems(tensors, modules, read_json(folder / "config.json"), fused):
        raise CheckFailedError(f"{folder}: {problem}")
    if source is not None:
        for problem in _differences(tensors, modules, source, tied or {}, rounded):
            raise CheckFailedError(f"{folder}: {problem}")


def _problems(
    tensors: StoredTensors,
    modules: Mapping[str, StoredModule],
    config: Mapping[str, object],
    fused: Sequence[Sequence[str]],
) -> Iterator[str]:
    owned = {name for module in modules.values() for name in module.tensors}
    for name in tensors.places:
        if name.rpartition(".")[2] in _KINDS and name not in owned:
            yield f"{name}: belongs to no quantized weight"
    for module in modules.values():
        yield from _shapes(tensors, module)
    matrices = [
        name.removesuffix(".weight")
        for name, place in tensors.places.items()
        if name.endswith(".weight") and len(place.shape) == 2 and name not in owned
    ]
    yield from check_config(config, {name: module.precision for name, module in modules.items()}, matrices)
    for module in modules.values():
        if _any(tensors, *_NAN[module.precision](module)):
            yield f"{_NAN[module.precision](module)[0]}: holds a byte that is NaN or negative"
    yield from _tensor_scales(tensors, modules, fused)
    yield from _cache_scales(tensors)


def _shapes(tensors: StoredTensors, module: StoredModule) -> Iterator[str]:
    codes, scales = tensors.places[module.codes], tensors.places[module.scales]
    if len(codes.shape) != 2:
        yield f"{module.codes}: shape {list(codes.shape)} where a matrix is needed"
    elif module.precision != "fp8":
        rows, columns = codes.shape[0], 2 * codes.shape[1]
        wanted = (rows, columns // BLOCK[module.precision])
        if scales.shape != wanted or columns % BLOCK[module.precision]:
            yield f"{module.scales}: shape {list(scales.shape)} where {list(wanted)} fits {module.codes}"
    for name in module.tensors[2:]:
        if prod(tensors.places[name].shape) != 1:
            yield f"{name}: shape {list(tensors.places[name].shape)} where one number is needed"


def _cache_scales(tensors: StoredTensors) -> Iterator[str]:
    """Scales of keys and values are one positive, finite number each."""
    for name, place in tensors.places.items():
        if name.endswith(_CACHE):
            if prod(place.shape) != 1:
                yield f"{name}: shape {list(place.shape)} where one number is needed"
            elif not (isfinite(scale := float(tensors.tensor(name).float())) and scale > 0):
                yield f"{name}: is {scale}, which is no scale"


def _tensor_scales(
    tensors: StoredTensors, modules: Mapping[str, StoredModule], fused: Sequence[Sequence[str]]
) -> Iterator[str]:
    """Scales of tensors are positive and finite, and one within what engines fuse; block scales reach their top."""
    found: dict[str, float] = {}
    for module in modules.values():
        single = module.precision == "fp8" and len(tensors.places[module.scales].shape) < 2
        for name in (*module.tensors[2:], *([module.scales] if single else [])):
            found[name] = float(tensors.tensor(name).float())
            if not (isfinite(found[name]) and found[name] > 0):
                yield f"{name}: is {found[name]}, which is no scale"
    widths = {name: tensors.places[module.codes].shape[1] for name, module in modules.items()}
    for group in dict.fromkeys(fused_groups(widths, fused).values()):
        members = [modules[name] for name in group]
        for kind in ("tensor_scale", "input_scale", "scales"):
            names = [name for one in members if (name := getattr(one, kind)) in found]
            if len({found[name] for name in names}) > 1:
                yield f"{', '.join(names)}: differ, and an engine that fuses these layers keeps one"
        yield from _top(tensors, members)


def _top(tensors: StoredTensors, members: Sequence[StoredModule]) -> Iterator[str]:
    divisor = divisor_of(tensors, members[0].tensor_scale)
    if divisor is None or divisor >= _MOST_DIVISOR:
        return
    pieces = (piece for one in members for piece in tensors.row_chunks(one.scales, max_bytes=_CHUNK_BYTES))
    top = max(float(piece.float().max()) for piece in pieces)
    if top < _LEAST_TOP and any(_any(tensors, one.codes, lambda piece: piece & 0x77 != 0) for one in members):
        yield f"{members[0].scales}: its largest block scale is {top:g}, where one in [{_LEAST_TOP:g}, 448] is needed"


_Test = Callable[[Tensor], Tensor]

_NAN: dict[Precision, Callable[[StoredModule], tuple[str, _Test]]] = {
    "nvfp4": lambda module: (module.scales, lambda piece: piece.view(torch.uint8) >= 0x7F),
    "mxfp4": lambda module: (module.scales, lambda piece: piece.view(torch.uint8) == 0xFF),
    "fp8": lambda module: (module.codes, lambda piece: piece.view(torch.uint8) & 0x7F == 0x7F),
}
"""The tensor of a module that can hold the byte of NaN, and which bytes must not be there."""


def _any(tensors: StoredTensors, name: str, what: _Test) -> bool:
    return any(bool(what(piece).any()) for piece in tensors.row_chunks(name, max_bytes=_CHUNK_BYTES))


# ------------------------------------------------------------------------------------------------ against what it was


def _differences(
    tensors: StoredTensors,
    modules: Mapping[str, StoredModule],
    source: StoredTensors,
    tied: Mapping[str, str],
    rounded: bool,
) -> Iterator[str]:
    owned = {name for module in modules.values() for name in module.tensors}
    for name in source.places:
        if (module := modules.get(name.removesuffix(".weight"))) is not None:
            rows, columns = source.places[name].shape
            found = tensors.places[module.codes].shape
            if found != (rows, columns if module.precision == "fp8" else columns // 2):
                yield f"{module.codes}: shape {list(found)}, and {name} of the source is {[rows, columns]}"
            elif rounded and not _is_rounded(tensors, module, source, name):
                yield f"{module.codes}: is not what {name} of the source is with the stored scales"
        elif name in tensors.places:
            if not same_tensor(tensors, name, source, name):
                yield f"{name}: is not as it is in the source"
        elif name not in tied:
            yield f"{name}: is missing"
    for name in tensors.places:
        if name not in owned and name not in source.places and not name.endswith(_CACHE):
            yield f"{name}: is not in the source"


def same_tensor(tensors: StoredTensors, name: str, source: StoredTensors, other: str) -> bool:
    """Whether two tensors have one dtype and shape and are the same to the byte."""
    here, there = tensors.places[name], source.places[other]
    if (here.dtype, here.shape) != (there.dtype, there.shape):
        return False
    ours = tensors.row_chunks(name, max_bytes=_CHUNK_BYTES)
    pairs = zip(ours, source.row_chunks(other, max_bytes=_CHUNK_BYTES), strict=True)
    return all(torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)) for a, b in pairs)


def _is_rounded(tensors: StoredTensors, module: StoredModule, source: StoredTensors, name: str) -> bool:
    """Whether the codes of a module are the nearest to the weights of the source, given the scales beside them."""
    rows, columns = source.places[name].shape
    step = max(1, _CHUNK_BYTES // (4 * max(1, columns)))
    divisor = divisor_of(tensors, module.tensor_scale)
    for start in range(0, rows, step):
        weight_RK = source.rows(name, start, start + step)
        codes = tensors.rows(module.codes, start, start + step)
        if module.precision == "fp8":
            if prod(tensors.places[module.scales].shape) != 1:
                return True  # other granularities come from elsewhere
            scale = float(tensors.tensor(module.scales))
            again, codes = quantize_fp8_with(weight_RK, scale).view(torch.uint8), codes.view(torch.uint8)
        else:
            scales = tensors.rows(module.scales, start, start + step).view(torch.uint8)
            again = quantize_with(module.precision, weight_RK, scales, divisor).packed
        if not torch.equal(codes, again):
            return False
    return True
