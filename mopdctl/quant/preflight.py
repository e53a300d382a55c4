"""What can be known before anything is written: magnitudes, shapes for tensor parallelism, room on disk, warnings."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mopdctl.config.quant import QuantConfig
from mopdctl.errors import InputError
from mopdctl.quant.check import same_tensor
from mopdctl.quant.plan import Plan
from mopdctl.quant.targets import experts_of
from mopdctl.quant.write import Stored

CHUNK_BYTES = 1 << 24
_RUNTIME_BYTES = 500_000_000  # python, torch and transformers, and what is made of a chunk
"""Of a weight that is read at a time."""

SPLIT_COLUMNS = frozenset(["o_proj", "out_proj", "down_proj", "w2", "dense_4h_to_h", "fc2", "fc_out", "wo"])
"""Last names of layers whose columns are divided among tensor-parallel ranks; of other layers rows are."""

OnRead = Callable[[int, int], None]
"""Told how many bytes of how many are read."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """What was found."""

    amax: dict[str, float]
    """Quantized module to the largest magnitude in its group."""
    document: dict[str, Any]
    """For the user: counts, sizes and warnings."""


def preflight(
    plan: Plan, config: QuantConfig, written: dict[str, Stored], root: Path, on_read: OnRead = lambda done, total: None
) -> Preflight:
    """Reads every weight once, and checks what would otherwise come up late.

    Args:
        plan: what becomes of each tensor.
        config: the settings.
        written: the tensors that will be written.
        root: of the workspace, where there has to be room for them.
        on_read: told of progress.

    Raises:
        InputError: a weight is NaN or infinite; a shape does not divide by `tp`; there is no room on the disk; what the
            configuration ties is there twice, and differs.
    """
    for size in config.tp:
        check_divisible(plan, size)
    num_bytes, free = check_room(written, root)
    _check_tied(plan)
    own = largest_magnitudes(plan, on_read)
    amax = {name: max(own[other] for other in module.group) for name, module in plan.quantized.items()}
    largest = max(place.num_bytes for place in plan.tensors.places.values())
    kept = Counter(module.kept for module in plan.modules.values() if module.precision == "bf16")
    return Preflight(
        amax,
        {
            "quantized": dict(sorted(Counter(module.precision for module in plan.quantized.values()).items())),
            "groups": len({module.group for module in plan.quantized.values() if len(module.group) > 1}),
            "kept": dict(sorted(kept.items())),
            "tied": dict(plan.tied),
            "zero": sorted(name for name in plan.quantized if own[name] == 0),
            "source_bytes": sum(place.num_bytes for place in plan.tensors.places.values()),
            "bytes": num_bytes,
            "disk_free_bytes": free,
            "memory_bytes": 2 * largest + _RUNTIME_BYTES,
            "warnings": list(warnings(plan, config)),
        },
    )


def _check_tied(plan: Plan) -> None:
    for name, kept in plan.tied.items():
        if not same_tensor(plan.tensors, name, plan.tensors, kept):
            raise InputError(
                f"{name}: config.json ties it to {kept}, and the file holds another; set `tie_word_embeddings: false` "
                "there if both are meant"
            )


def check_room(written: dict[str, Stored], root: Path) -> tuple[int, int]:
    """Bytes that will be written, and that are free on the disk. Raises InputError if there is no room for them."""
    num_bytes = sum(tensor.num_bytes for tensor in written.values())
    room = root
    while not room.exists():
        room = room.parent
    free = shutil.disk_usage(room).free
    if num_bytes > free:
        raise InputError(f"{root}: {num_bytes / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB free; make room")
    return num_bytes, free


def largest_magnitudes(plan: Plan, on_read: OnRead) -> dict[str, float]:
    """The largest magnitude of each matrix. Raises InputError naming a tensor that holds NaN or infinity."""
    found: dict[str, float] = {}
    places = plan.tensors.places
    done, total = 0, sum(place.num_bytes for place in places.values())
    for name, place in places.items():
        amax = 0.0
        if place.dtype.is_floating_point and place.num_bytes:
            amax = max(_amax(name, piece) for piece in plan.tensors.row_chunks(name, max_bytes=CHUNK_BYTES))
        found[name.removesuffix(".weight")] = amax
        done += place.num_bytes
        on_read(done, total)
    return found


def _amax(name: str, piece: Tensor) -> float:
    low, high = (float(each.float()) for each in torch.aminmax(piece))  # as everything is computed
    found = max(-low, high)
    if not (isfinite(low) and isfinite(high)):
        raise InputError(
            f"{name}: holds NaN or infinity, in float32; the checkpoint is broken, train or download it again"
        )
    return found


def check_divisible(plan: Plan, size: int) -> None:
    """Refuses shapes that cannot be divided among `size` tensor-parallel ranks. Raises InputError naming the module."""
    for name, module in plan.quantized.items():
        rows, columns = module.shape
        block = {"nvfp4": 16, "mxfp4": 32}.get(module.precision, 1)
        which, length, unit = ("columns", columns, block) if _splits_columns(name) else ("rows", rows, 1)
        if length % (size * unit):
            raise InputError(
                f"{name}: {length} {which} cannot be divided among {size} ranks"
                + (f" in blocks of {block}" if unit > 1 else "")
                + f"; leave it as it is (--ignore {name}) or serve with fewer"
            )


def _splits_columns(name: str) -> bool:
    return name.rpartition(".")[2] in SPLIT_COLUMNS


def warnings(plan: Plan, config: QuantConfig) -> Iterator[str]:
    """What will load, and not do what one might think."""
    precisions = {module.precision for module in plan.quantized.values()}
    if "mxfp4" in precisions and config.act == "none":
        yield (
            "vLLM (up to 0.33) quantizes activations of MXFP4 layers on SM100 and later although this checkpoint does "
            "not ask for it; NVFP4 with `act: none` runs as it says"
        )
    experts = {module.precision for name, module in plan.quantized.items() if experts_of(name)}
    if "fp8" in experts and config.act == "none":
        yield "vLLM has no kernel for FP8 experts without quantized activations; use `act: dynamic`"
    elif "fp8" in precisions and config.act == "none":
        yield (
            "on SM89 and later (H100, H200) older versions of vLLM (0.24) load FP8 weights beside inputs in 16 bits "
            "only with VLLM_TEST_FORCE_FP8_MARLIN=1; `act: dynamic` runs as W8A8 without it"
        )
    if config.layout == "modelopt" and set(plan.absent) & {"lm_head"}:
        yield (
            "older versions of vLLM (0.24) fail on a ModelOpt layout whose output head is tied to the embeddings; "
            "`layout: compressed-tensors` loads there"
        )
    for size in config.tp:
        for name, module in plan.quantized.items():
            if module.precision == "nvfp4" and _splits_columns(name) and module.shape[1] // size % 32:
                yield (
                    f"{name}: with {size} ranks each has {module.shape[1] // size} columns, no multiple of 32, which "
                    "some NVFP4 kernels get wrong"
                )
                break
    everywhere = {module.precision for name, module in plan.modules.items() if experts_of(name)}
    if experts and (len(everywhere) > 1 or "nvfp4" in experts):
        yield (
            "transformers (up to 5.19) reads experts right only if those of all layers are MXFP4, or all FP8; vLLM and "
            "mopdctl read these too"
        )
    if plan.fused_experts:
        yield f"{plan.fused_experts[0]}: its experts lie in one tensor and stay as they are"
    if config.kv_cache == "fp8" and not plan.attention:
        yield "no module with k_proj and v_proj was found: engines take 1 as the scale of FP8 keys and values"
