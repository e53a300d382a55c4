"""An FP4 checkpoint in another low-precision format, without going through BF16: NVFP4 from MXFP4, FP8 from both.

Exact where the numbers fit (`fp4.moves`); how many blocks had to be rounded is in the card, weight by weight. Tensors
that are not FP4 are carried over as they are, and so is what the configuration says of them.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mopdctl.config.quant import QuantConfig
from mopdctl.engines.fp4 import FORMATS, StoredModule, divisor_of, scheme_of, stored_modules
from mopdctl.engines.fusing import fused_groups
from mopdctl.engines.weights import StoredTensors, open_tensors
from mopdctl.errors import InputError
from mopdctl.files import fingerprint, read_json, write_json
from mopdctl.fp4.fp8 import SIDE
from mopdctl.fp4.moves import Losses, fp4_to_fp8, mxfp4_to_nvfp4, top_exponent
from mopdctl.fp4.quantized import Quantized
from mopdctl.quant.check import check_checkpoint
from mopdctl.quant.journal import Journal
from mopdctl.quant.layouts import compressed_tensors
from mopdctl.quant.run import PROVENANCE, OnTensor, local_folder
from mopdctl.quant.write import Parts, Stored, index
from mopdctl.runs import (
    Workspace,
    building,
    check_name_is_ours,
    checkpoint_digest,
    finished,
    locked,
    model_identity,
    open_run,
    package_versions,
    write_card,
)

Target = Literal["nvfp4", "fp8"]

_CHUNK_BYTES = 1 << 24
_SETTINGS = {"model", "name", "format", "act", "max_shard_gb", "fused", "description"}
"""Fields of the configuration that a move knows."""


@dataclass(frozen=True, slots=True)
class Move:
    """What becomes of a checkpoint, as far as it is known without reading weights."""

    config: QuantConfig
    target: Target
    tensors: StoredTensors
    moved: dict[str, StoredModule]
    groups: tuple[tuple[str, ...], ...]
    """The moved modules, those that share a divisor together."""
    copied: tuple[str, ...]
    block: dict[str, Any]
    """The new `quantization_config`."""
    written: dict[str, Stored]


def is_move(config: QuantConfig, workspace: Workspace, *, base: Path) -> bool:
    """Whether the model is a checkpoint that is quantized already, so that it can be moved at most."""
    path = Path(workspace.resolve_model(config.model, relative_to=base))
    file = path / "config.json"
    return file.is_file() and "quantization_config" in read_json(file)


def plan_move(config: QuantConfig, workspace: Workspace, *, base: Path) -> dict[str, Any]:
    """Checks all that needs no weights; says what would be done. Writes nothing."""
    target = workspace.checkpoint(config.name)
    move = open_move(config, workspace, base=base)
    check_name_is_ours(target, workspace.run(config.name), _record(move))
    return {
        "name": config.name,
        "checkpoint": str(target),
        "move": move.target,
        "modules": len(move.moved),
        "bytes": sum(tensor.num_bytes for tensor in move.written.values()),
    }


def open_move(config: QuantConfig, workspace: Workspace, *, base: Path) -> Move:
    """Opens the source and plans.

    Raises:
        InputError: the source is no FP4 checkpoint in the compressed-tensors layout or nothing in it can move to the
            format, a setting has no meaning here, or a shape does not fall into blocks that engines read.
    """
    path = local_folder(workspace.resolve_model(config.model, relative_to=base))
    what = f"model {path}: is quantized already"
    if config.format not in ("nvfp4", "fp8"):
        raise InputError(f"{what} and moves to nvfp4 or fp8, not to {config.format}; quantize its source instead")
    for name, field in QuantConfig.model_fields.items():
        if name not in _SETTINGS and getattr(config, name) != field.get_default(call_default_factory=True):
            raise InputError(f"{what} and only changes its format, so that `{name}` means nothing; leave it out")
    if config.act == "dynamic" and config.format == "nvfp4":
        raise InputError(
            f"{what}; scales of NVFP4 inputs come from calibration: quantize its source with `act: dynamic`"
        )
    tensors = open_tensors(str(path))
    _check_no_foreign_fp4(tensors)
    block = read_json(path / "config.json").get("quantization_config") or {}
    if block.get("quant_method") != "compressed-tensors":
        raise InputError(
            f"model {path}: quantized as {block.get('quant_method')!r}; only compressed-tensors checkpoints move"
        )
    modules = stored_modules(tensors)
    from_ = {"mxfp4"} if config.format == "nvfp4" else {"mxfp4", "nvfp4"}
    moved = {name: module for name, module in modules.items() if module.precision in from_}
    if not moved:
        raise InputError(f"model {path}: has no {' or '.join(sorted(from_))} weight that could move to {config.format}")
    columns = {name: 2 * tensors.places[module.codes].shape[1] for name, module in moved.items()}
    groups = fused_groups(columns, config.fused) if config.format == "nvfp4" else {name: (name,) for name in moved}
    parts = {tensor for module in moved.values() for tensor in module.tensors}
    copied = tuple(name for name in tensors.places if name not in parts)
    written: dict[str, Stored] = {}
    owners = {module.codes: name for name, module in moved.items()}
    for name, place in tensors.places.items():
        if name in owners:
            written |= _stored(owners[name], place.shape, config.format)
        elif name not in parts:
            written[name] = Stored(place.dtype, place.shape)
    new = _moved_config(block, moved, config)
    return Move(config, config.format, tensors, moved, tuple(dict.fromkeys(groups.values())), copied, new, written)


def move_checkpoint(
    config: QuantConfig,
    workspace: Workspace,
    *,
    base: Path,
    on_tensor: OnTensor = lambda done, total, name: None,
) -> Path:
    """Writes the checkpoint `config.name`; returns its folder. The same move is left as it is.

    Tensor by tensor, with a journal as in `quantize_model`: killed at any moment, the same call goes on there.

    Raises:
        InputError: something else has the name, the run was begun with other settings or another source, or the source
            cannot move.
        CheckFailedError: the bytes that were written are not what they should be.
    """
    target, folder = workspace.checkpoint(config.name), workspace.run(config.name)
    move = open_move(config, workspace, base=base)
    record = _record(move)
    if finished(target, folder, record):
        return target
    with locked(folder):
        if finished(target, folder, record):
            return target
        open_run(folder, record)
        parts = Parts(folder / "parts", move.written, max_bytes=int(config.max_shard_gb * 1e9))
        journal = Journal(folder / "journal.jsonl", parts)
        try:
            for done, name in enumerate(_write(move, parts, journal), start=1):
                on_tensor(done, len(move.copied) + len(move.moved), name)
        finally:
            journal.close()
        with building(target) as temporary:
            modules = {name: journal.entries[name]["statistics"] for name in move.moved}
            _assemble(move, record, parts, modules, temporary)
            check_checkpoint(temporary)
            card = {"name": config.name, "parent": config.model, "algorithm": f"move/{move.target}"}
            made_by = {"config": record, "fingerprint": fingerprint(record), "move": summary(modules)}
            write_card(temporary, card | made_by | {"digest": checkpoint_digest(temporary)})
        shutil.rmtree(parts.folder)
    return target


def summary(modules: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What a move kept: counts over all weights, and those with rounded blocks by name, each with its counts."""
    losses = {name: Losses(**one["move"]) for name, one in modules.items()}
    total = sum(losses.values(), Losses(0, 0, 0, 0))
    rounded = {name: asdict(one) for name, one in losses.items() if one.rounded_blocks}
    exact = sum(one.changed_elements == 0 for one in losses.values())
    return {"weights": len(losses), "exact_weights": exact, **asdict(total), "rounded": rounded}


def _write(move: Move, parts: Parts, journal: Journal) -> Iterator[str]:
    """Writes what the journal does not have; yields each name once it is there."""
    for name in move.copied:
        if name not in journal.entries:
            digest = parts.write(name, move.tensors.row_chunks(name, max_bytes=_CHUNK_BYTES))
            journal.add(name, {name: digest}, {})
        yield name
    for group in move.groups:
        if all(name in journal.entries for name in group):
            yield from group
            continue
        sources = {name: _quantized(move.tensors, move.moved[name]) for name in group}
        tops = []
        if move.target == "nvfp4":
            tops = [top for name, one in sources.items() if (top := _named(name, top_exponent, one)) is not None]
        for name, one in sources.items():
            if name not in journal.entries:
                encoded, losses = _encoded(name, one, move.target, max(tops, default=None))
                digests = {tensor: parts.write(tensor, [values]) for tensor, values in encoded.items()}
                numbers = {"precision": move.target, "elements": losses.elements, "move": asdict(losses)}
                journal.add(name, digests, numbers)
            yield name


def _quantized(tensors: StoredTensors, module: StoredModule) -> Quantized:
    assert module.precision != "fp8"
    scales = tensors.tensor(module.scales).view(torch.uint8)
    return Quantized(module.precision, tensors.tensor(module.codes), scales, divisor_of(tensors, module.tensor_scale))


def _encoded(name: str, source: Quantized, target: Target, top: int | None) -> tuple[dict[str, Tensor], Losses]:
    if target == "nvfp4":
        found, losses = _named(name, mxfp4_to_nvfp4, source, top)
        return compressed_tensors.encode(name, found, None), losses
    codes, scales, losses = _named(name, fp4_to_fp8, source)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scales}, losses


def _named(name: str, function: Any, *arguments: Any) -> Any:
    """What the function gives, an error of it with the name of the weight."""
    try:
        return function(*arguments)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def _stored(name: str, packed: tuple[int, ...], target: Target) -> dict[str, Stored]:
    rows, columns = packed[0], 2 * packed[1]
    if target == "nvfp4":
        return compressed_tensors.stored(name, (rows, columns), "nvfp4", activations=False)
    if rows % SIDE or columns % SIDE:
        raise InputError(
            f"{name}: {rows} x {columns} does not divide into blocks of {SIDE} x {SIDE}, and readers of "
            "compressed-tensors take such scales for those of other blocks; quantize its source to fp8 instead"
        )
    return {
        f"{name}.weight": Stored(torch.float8_e4m3fn, (rows, columns)),
        f"{name}.weight_scale": Stored(torch.float32, (rows // SIDE, columns // SIDE)),
    }


def _moved_config(block: Mapping[str, Any], moved: Mapping[str, StoredModule], config: QuantConfig) -> dict[str, Any]:
    """The configuration with the groups of moved weights in their new format; targets and ignored names stay."""
    by_scheme: dict[int, str] = {}
    for name, module in moved.items():
        scheme = scheme_of(block, name)
        said = None if scheme is None else FORMATS.get(scheme.get("format") or block["format"])
        if said != module.precision:
            raise InputError(f"{name}: is {module.precision}, and config.json says {said or 'nothing'}; repair it")
        by_scheme[id(scheme)] = name
    target: Target = "nvfp4" if config.format == "nvfp4" else "fp8"
    groups = {
        name: _group(group, target, activations=config.act == "dynamic")
        if id(group) in by_scheme
        else dict(group) | {"format": group.get("format") or block["format"]}
        for name, group in block["config_groups"].items()
    }
    formats = {group["format"] for group in groups.values()}
    return dict(block) | {
        "config_groups": groups,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
    }


def _group(group: Mapping[str, Any], target: Target, *, activations: bool) -> dict[str, Any]:
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    if target == "nvfp4":
        made = compressed_tensors.quantization_config({"": "nvfp4"}, [], activations=False, kv_cache=False)
        new = made["config_groups"]["group_0"]
        changed = {key: new[key] for key in ("format", "weights", "input_activations")}
    else:
        changed = {
            "format": "float-quantized",
            "weights": fp8 | {"strategy": "block", "dynamic": False, "block_structure": [SIDE, SIDE]},
            "input_activations": fp8 | {"strategy": "group", "dynamic": True, "group_size": SIDE}
            if activations
            else None,
        }
    return dict(group) | changed


def _check_no_foreign_fp4(tensors: StoredTensors) -> None:
    """Refuses the native files of gpt-oss: experts in one tensor, gate and up in turns, which no other format names."""
    if name := next((name for name in tensors.places if name.endswith("_blocks")), None):
        raise InputError(
            f"model {tensors.path}: {name} holds all experts of a layer as gpt-oss stores them; convert the checkpoint "
            "to compressed-tensors first"
        )


def _assemble(move: Move, record: Mapping[str, Any], parts: Parts, modules: Mapping[str, Any], folder: Path) -> None:
    source = Path(move.tensors.path)
    weights = {place.file.name for place in move.tensors.places.values()}
    made = {*weights, "config.json", "model.safetensors.index.json", "card.json", "teacher_manifest.json", PROVENANCE}
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in made and not file.name.startswith("."):
            shutil.copyfile(file, folder / file.name)
    for shard in parts.shards:
        try:
            os.link(parts.folder / shard.file, folder / shard.file)
        except OSError:  # a file system without hard links
            shutil.copyfile(parts.folder / shard.file, folder / shard.file)
    if len(parts.shards) > 1:
        write_json(folder / "model.safetensors.index.json", index(parts.shards, parts.tensors))
    write_json(folder / "config.json", read_json(source / "config.json") | {"quantization_config": move.block})
    provenance = {"schema": "mopdctl.quantization/1", **record, "versions": package_versions(), "modules": modules}
    write_json(folder / PROVENANCE, provenance)


def _record(move: Move) -> dict[str, Any]:
    """What decides the bytes: the settings and the digest of the source."""
    settings = move.config.model_dump(mode="json", include=_SETTINGS - {"name", "model", "description"})
    return {"source": model_identity(move.tensors.path), "move": move.target, "settings": settings}
