"""Whether a quantization configuration is one that engines take, and says the same as the tensors beside it."""

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mopdctl.engines.fp4 import ALGORITHMS, FORMATS, Precision, scheme_of

ARGUMENTS = frozenset(
    [
        "num_bits",
        "type",
        "symmetric",
        "group_size",
        "strategy",
        "block_structure",
        "dynamic",
        "actorder",
        "scale_dtype",
        "zp_dtype",
        "observer",
        "observer_kwargs",
    ]
)
"""Keys of `weights` and the like that compressed-tensors 0.17 knows; it refuses all others."""

SCHEME = frozenset(["targets", "weights", "input_activations", "output_activations", "format"])
"""Keys of a group in `config_groups`, likewise."""

_WEIGHTS: dict[Precision, dict[str, Any]] = {
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    "fp8": {"num_bits": 8, "type": "float"},
}


def check_config(
    config: Mapping[str, Any], quantized: Mapping[str, Precision], matrices: Iterable[str]
) -> Iterator[str]:
    """What is wrong with a model's configuration.

    Args:
        config: config.json.
        quantized: modules that are quantized, by their tensors.
        matrices: modules with a matrix that is not.
    """
    block = config.get("quantization_config")
    if not isinstance(block, dict):
        yield "config.json: no `quantization_config`"
        return
    if not quantized:
        yield "no tensor is quantized"
    if block.get("quant_method") == "modelopt":
        yield from _modelopt(block, quantized, matrices)
        return
    if block.get("quant_method") != "compressed-tensors":
        yield f"config.json: `quant_method` {block.get('quant_method')!r} is not known"
        return
    problems = list(_compressed_tensors(block))
    yield from problems
    if not problems:
        yield from _agreement(block, quantized, matrices)


def _compressed_tensors(block: Mapping[str, Any]) -> Iterator[str]:
    groups = block.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        yield "config.json: `config_groups` is missing"
        return
    for name, group in groups.items():
        if unknown := sorted(group.keys() - SCHEME):
            yield f"config.json: {name}: compressed-tensors 0.17 refuses the key {unknown[0]!r}"
        for part in ("weights", "input_activations", "output_activations"):
            if unknown := sorted((group.get(part) or {}).keys() - ARGUMENTS):
                yield f"config.json: {name}.{part}: compressed-tensors 0.17 refuses the key {unknown[0]!r}"
        precision = FORMATS.get(str(group.get("format") or block.get("format")))
        if precision is None:
            yield f"config.json: {name}: format {group.get('format')!r} is not known"
            continue
        weights = group.get("weights") or {}
        if wrong := [key for key, value in _WEIGHTS[precision].items() if weights.get(key) != value]:
            yield f"config.json: {name}.weights: {wrong[0]} is {weights.get(wrong[0])!r}, which is not {precision}"
    if unknown := sorted((block.get("kv_cache_scheme") or {}).keys() - ARGUMENTS):
        yield f"config.json: kv_cache_scheme: compressed-tensors 0.17 refuses the key {unknown[0]!r}"


def _agreement(block: Mapping[str, Any], quantized: Mapping[str, Precision], matrices: Iterable[str]) -> Iterator[str]:
    for name, precision in quantized.items():
        scheme = scheme_of(block, name)
        if scheme is None:
            yield f"{name}: is quantized, and config.json ignores it or has no target for it"
        elif (said := FORMATS[scheme.get("format") or block["format"]]) != precision:
            yield f"{name}: is {precision}, and config.json says {said}"
    for name in matrices:
        if scheme_of(block, name) is not None:
            yield f"{name}: is not quantized, and config.json does not ignore it"


def _modelopt(block: Mapping[str, Any], quantized: Mapping[str, Precision], matrices: Iterable[str]) -> Iterator[str]:
    algorithm = block.get("quant_algo")
    if algorithm not in ALGORITHMS:
        yield f"config.json: no engine loads the `quant_algo` {algorithm!r} in the modelopt layout"
        return
    layers = block.get("quantized_layers") or {}
    ignore = block.get("ignore") or []
    for name, precision in quantized.items():
        said = layers.get(name, {}).get("quant_algo") if algorithm == "MIXED_PRECISION" else algorithm
        if any(fnmatch.fnmatch(name, pattern) for pattern in ignore):
            yield f"{name}: is quantized, and config.json ignores it"
        elif said is None or ("fp8" if said == "FP8" else "nvfp4") != precision:
            yield f"{name}: is {precision}, and config.json says {said or 'nothing'}"
    for name in matrices:
        if not any(fnmatch.fnmatch(name, pattern) for pattern in ignore):
            yield f"{name}: is not quantized, and config.json does not ignore it"
