"""What quantization did to a checkpoint, as one JSON document: sizes, errors of its weights, and a comparison.

Sizes are those of the exported tensors; errors of weights were taken from the exported bytes while they were written.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from mopdctl.engines.weights import StoredTensors, open_tensors
from mopdctl.errors import InputError
from mopdctl.files import read_json, write_json
from mopdctl.quant.compare import Comparing, compare
from mopdctl.quant.moves import summary
from mopdctl.quant.run import PROVENANCE
from mopdctl.runs import Workspace, read_card

SCHEMA = "mopdctl.quantization_report/1"

_SUMS = ("squared_error", "squared_weight", "squared_quantized", "product")
_COUNTS = ("blocks", "zero_blocks", "four_blocks", "clipped_blocks", "underflowed_blocks")


def report_on(
    checkpoint: Path,
    source: str,
    how: Comparing | None,
    workspace: Workspace,
    *,
    base: Path,
    on_note: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The report of a checkpoint, with a comparison if `how` says on what; also written to `runs/NAME/report.json`.

    A comparison that cannot be made (a head that is more than a product, say) is a reason in the report: the checkpoint
    is there all the same.
    """
    comparison = reason = None
    if how is not None:
        try:
            comparison = compare(source, str(checkpoint), how, workspace, base=base, on_note=on_note)
        except InputError as error:
            reason = str(error)
    folder = Path(source) if Path(source).is_dir() else None
    report = build_report(checkpoint, folder, comparison=comparison, reason=reason)
    write_json(workspace.run(checkpoint.name) / "report.json", report)
    return report


def build_report(
    checkpoint: Path, source: Path | None, *, comparison: Mapping[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    """The report of a checkpoint that `mopdctl quantize` wrote.

    Args:
        checkpoint: its folder.
        source: what it was made of; None if that is not there any more.
        comparison: what `compare` found.
        reason: why there is none.

    Raises:
        InputError: `mopdctl quantize` did not write the checkpoint.
    """
    if not (checkpoint / PROVENANCE).is_file():
        raise InputError(f"{checkpoint}: holds no {PROVENANCE}; only what `mopdctl quantize` wrote has a report")
    made = read_json(checkpoint / PROVENANCE)
    modules: dict[str, dict[str, Any]] = made["modules"]
    tensors = open_tensors(str(checkpoint))
    settings = made["settings"]
    missing: dict[str, str] = {}
    source_bytes = None
    if source is None:
        missing["source_bytes"] = "the source is not there"
    else:
        source_bytes = _num_bytes(open_tensors(str(source)))
    moved = all("move" in one for one in modules.values())
    if moved:
        missing["errors"] = "the checkpoint was moved from another low-precision format; see `move`"
    if comparison is None:
        missing["comparison"] = reason or "no rows to compare on were given"
    block = read_json(checkpoint / "config.json")["quantization_config"]
    activations = sorted(_quantized_inputs(block))
    return {
        "schema": SCHEMA,
        "name": read_card(checkpoint).get("name", checkpoint.name),
        "parent": read_card(checkpoint).get("parent"),
        "checkpoint": str(checkpoint),
        "settings": settings,
        "quantized": dict(sorted(Counter(one["precision"] for one in modules.values()).items())),
        "kept": dict(sorted(Counter(made.get("kept", {}).values()).items())),
        "warnings": made.get("warnings", []),
        "size": {**_sizes(tensors, modules), "source_bytes": source_bytes},
        "kernels": list(kernels({one["precision"] for one in modules.values()}, quantized_inputs=bool(activations))),
        "move": summary(modules) if moved else None,
        "errors": None if moved else _errors(modules),
        "comparison": None if comparison is None else dict(comparison),
        "not_measured": missing,
    }


def kernels(precisions: Iterable[str], *, quantized_inputs: bool) -> Iterable[str]:
    """What an engine will run for each precision: not always what the checkpoint asks for.

    Source: the scheme selection of vLLM 0.33 for compressed-tensors; its issue 56770 for MXFP4.
    """
    precisions = set(precisions)
    if "nvfp4" in precisions and quantized_inputs:
        yield (
            "NVFP4: on SM90 (H100, H200) and older vLLM runs it as W4A16, inputs in 16 bits; as W4A4 on SM100 and "
            "later. Scores taken on SM90 say nothing about W4A4"
        )
    elif "nvfp4" in precisions:
        yield "NVFP4: runs as W4A16 on every GPU, SM90 (H100, H200) included"
    if "mxfp4" in precisions:
        asked = "" if quantized_inputs else ", though the checkpoint asks for W4A16"
        yield f"MXFP4: runs as W4A16 on SM90 (H100, H200); vLLM up to 0.33 may run it as W4A4 on SM100 and later{asked}"
    if "fp8" in precisions:
        yield "FP8: runs as " + ("W8A8 on SM89 and later" if quantized_inputs else "W8A16")


def _quantized_inputs(block: Mapping[str, Any]) -> set[str]:
    """Groups of a configuration whose inputs are quantized, of either layout."""
    groups = block.get("config_groups") or {}
    found = {name for name, group in groups.items() if group.get("input_activations")}
    layers = block.get("quantized_layers") or {}
    return found | {name for name, one in layers.items() if not one["quant_algo"].startswith("W")}


def _sizes(tensors: StoredTensors, modules: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Bytes, and bits per element: of the weights that are quantized with their scales, and of the whole checkpoint."""
    quantized = {
        name for name in tensors.places if (owner := name.rpartition("."))[0] in modules and owner[2] != "bias"
    }
    quantized_bytes = sum(tensors.places[name].num_bytes for name in quantized)
    elements = sum(one["elements"] for one in modules.values())
    others = sum(prod(place.shape) for name, place in tensors.places.items() if name not in quantized)
    return {
        "bytes": _num_bytes(tensors),
        "quantized_bytes": quantized_bytes,
        "quantized_weights": len(modules),
        "quantized_elements": elements,
        "elements": elements + others,
        "bits_per_quantized_element": 8 * quantized_bytes / elements,
        "bits_per_element": 8 * _num_bytes(tensors) / (elements + others),
    }


def _num_bytes(tensors: StoredTensors) -> int:
    return sum(place.num_bytes for place in tensors.places.values())


# -------------------------------------------------------------------------------------------------- errors of weights


def _errors(modules: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Errors over all weights, by precision, by decoder layer, by kind of module, and of each weight."""
    return {
        "all": add_up(modules.values()),
        "by_precision": _grouped(modules, lambda name: str(modules[name]["precision"])),
        "by_layer": _grouped(modules, layer_of),
        "by_kind": _grouped(modules, kind_of),
        "weights": {name: {"precision": one["precision"], **add_up([one])} for name, one in modules.items()},
    }


def add_up(statistics: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The error of several weights as of one.

        relative_mse = sum (quantized - weight)^2 / sum weight^2        cosine of the two as vectors

    Shares are of blocks: those whose largest code is 4 (what four-over-six chose, and chance), those with a value above
    seven steps, and those that are zero only since they were quantized. Null where no weight has blocks.
    """
    found = list(statistics)
    sums = {name: sum(float(one[name]) for one in found) for name in _SUMS}
    with_blocks = [one for one in found if "blocks" in one]
    counts = {name: sum(int(one[name]) for one in with_blocks) for name in _COUNTS}
    norms = (sums["squared_weight"] * sums["squared_quantized"]) ** 0.5
    present = counts["blocks"] - counts["zero_blocks"]
    return {
        "weights": len(found),
        "elements": sum(int(one["elements"]) for one in found),
        "relative_mse": sums["squared_error"] / sums["squared_weight"] if sums["squared_weight"] else 0.0,
        "cosine": sums["product"] / norms if norms else None,
        "blocks": counts["blocks"] if with_blocks else None,
        "four_share": counts["four_blocks"] / present if present else None,
        "clipped_blocks": counts["clipped_blocks"] if with_blocks else None,
        "underflowed_blocks": counts["underflowed_blocks"] if with_blocks else None,
    }


def _grouped(modules: Mapping[str, Mapping[str, Any]], key: Callable[[str], str]) -> dict[str, Any]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for name, one in modules.items():
        groups.setdefault(key(name), []).append(one)
    return {name: add_up(found) for name, found in groups.items()}


def layer_of(name: str) -> str:
    """The decoder layer of a weight: its name up to the first number; the name itself outside of layers."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return found.group() if found else name


def kind_of(name: str) -> str:
    """What a weight is in its layer: the name with every number as a star."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
