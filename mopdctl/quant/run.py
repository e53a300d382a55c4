"""From a checkpoint to a quantized one: plan, preflight, one weight after another, check, folder."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from mopdctl.config.quant import PrecisionRule, QuantConfig
from mopdctl.engines.fp4 import dequantized, stored_modules
from mopdctl.engines.hf import default_device
from mopdctl.engines.weights import open_tensors
from mopdctl.errors import InputError
from mopdctl.files import fingerprint, read_json, write_json
from mopdctl.quant.calibration import CalibrationRows, calibration_rows
from mopdctl.quant.check import check_checkpoint
from mopdctl.quant.journal import Journal
from mopdctl.quant.layerwise import LayerwiseModel
from mopdctl.quant.layouts import LAYOUTS, Layout
from mopdctl.quant.mixed import mixed_precision
from mopdctl.quant.moments import Moments
from mopdctl.quant.plan import Module, Plan, make_plan
from mopdctl.quant.preflight import CHUNK_BYTES, OnRead, check_room, preflight, warnings
from mopdctl.quant.sequential import calibrate
from mopdctl.quant.tensor import quantize_weight, statistics
from mopdctl.quant.write import Parts, Stored
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

PROVENANCE = "mopdctl_quantization.json"
"""What made a checkpoint and how far each weight is off: in a file of its own, since readers of compressed-tensors
refuse keys that they do not know."""

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx"}
_MADE = {"config.json", "model.safetensors.index.json", "card.json", "teacher_manifest.json", PROVENANCE}

CALIBRATION_TOKENS = "calibration_tokens"
"""Of a weight's entry there: tokens of the calibration that its layer read; 0 for an expert that none was routed to."""

OnTensor = Callable[[int, int, str], None]
"""Told how many modules and tensors of how many are written, and the last one's name."""


@dataclass(frozen=True, slots=True)
class Job:
    """A checkpoint to quantize, as far as it is known without reading weights."""

    config: QuantConfig
    plan: Plan
    layout: Layout
    written: dict[str, Stored]
    """All tensors of the new checkpoint."""
    rows: CalibrationRows | None
    """What is run through the model to see what its layers read."""

    @property
    def activations(self) -> bool:
        """Whether inputs of quantized layers are quantized too."""
        return self.config.act == "dynamic"


def open_job(config: QuantConfig, workspace: Workspace, *, base: Path) -> Job:
    """Opens the source and plans. Raises InputError for whatever `make_plan` refuses."""
    path = local_folder(workspace.resolve_model(config.model, relative_to=base))
    if (path / "adapter_config.json").exists():
        raise InputError(f"model {path}: is a LoRA adapter; fold it into its base first (peft: merge_and_unload)")
    plan = make_plan(config, open_tensors(str(path)))
    layout = LAYOUTS[config.layout]
    rows = None
    if config.calibration is not None:
        rows = calibration_rows(config.calibration, str(path), workspace, base=base)
    return Job(config, plan, layout, _written(plan, layout, config), rows)


def plan_quantization(
    config: QuantConfig, workspace: Workspace, *, base: Path, on_read: OnRead = lambda done, total: None
) -> dict[str, Any]:
    """Checks all that can be checked; says what would be done. Writes nothing."""
    target = workspace.checkpoint(config.name)
    job = open_job(config, workspace, base=base)
    check_name_is_ours(target, workspace.run(config.name), _record(job))
    found = preflight(job.plan, config, job.written, workspace.root, on_read)
    return _settings(config, target) | found.document


def quantize_model(
    config: QuantConfig,
    workspace: Workspace,
    *,
    base: Path,
    on_read: OnRead = lambda done, total: None,
    on_tensor: OnTensor = lambda done, total, name: None,
) -> Path:
    """Writes the checkpoint `config.name`; returns its folder. The same quantization is left as it is.

    At most two copies of the largest tensor are in memory. What is written lies in the run's folder, a line of its
    journal for each module; killed at any moment, the same call goes on there and ends with the same bytes.

    Args:
        config: what to quantize, and how.
        workspace: where the result goes.
        base: folder that a relative path in `config` starts from.
        on_read: told of the bytes that the preflight has read.
        on_tensor: told of each module or tensor that is written.

    Raises:
        InputError: something else has the name, the run was begun with other settings or another source, or the source
            cannot be quantized so.
        CheckFailedError: the bytes that were written are not what they should be.
    """
    target, folder = workspace.checkpoint(config.name), workspace.run(config.name)
    job = open_job(config, workspace, base=base)
    record = _record(job)
    if finished(target, folder, record):
        return target
    with locked(folder):
        if finished(target, folder, record):
            return target
        open_run(folder, record)
        amax = preflight(job.plan, config, job.written, workspace.root, on_read).amax
        decided = None
        if config.bits is not None:
            job, decided = _within_budget(job, amax, folder)
            check_room(job.written, workspace.root)
        parts = Parts(folder / "parts", job.written, max_bytes=int(config.max_shard_gb * 1e9))
        journal = Journal(folder / "journal.jsonl", parts)
        try:
            _write(job, amax, parts, journal, on_tensor)
        finally:
            journal.close()
        with building(target) as temporary:
            _assemble(job, record | ({"precision": decided} if decided else {}), parts, journal, temporary)
            check_checkpoint(
                temporary,
                source=job.plan.tensors,
                tied=job.plan.tied,
                rounded=config.method != "gptq",
                fused=config.fused,
            )
            card = {"name": config.name, "parent": config.model, "algorithm": f"quantize/{config.format}"}
            made_by = {"config": record, "fingerprint": fingerprint(record)}
            write_card(temporary, card | made_by | {"digest": checkpoint_digest(temporary)})
        shutil.rmtree(parts.folder)
    return target


def _within_budget(job: Job, amax: Mapping[str, float], folder: Path) -> tuple[Job, dict[str, Any]]:
    """The job with a precision for each layer, and what they were decided on; decided once for a run."""
    assert job.rows is not None  # the configuration asks for calibration beside `bits`
    file = folder / "precision.json"
    if not file.exists():
        rules, decided = mixed_precision(job.config, job.plan, amax, job.rows.token_ids, default_device())
        write_json(file, {"rules": [rule.model_dump() for rule in rules], "decided": decided})
    found = read_json(file)
    rules = [*job.config.rules, *(PrecisionRule.model_validate(rule) for rule in found["rules"])]
    config = job.config.model_copy(update={"rules": rules})
    plan = make_plan(config, job.plan.tensors)
    return Job(config, plan, job.layout, _written(plan, job.layout, config), job.rows), found


# ------------------------------------------------------------------------------------------------------------- writing


def _write(job: Job, amax: Mapping[str, float], parts: Parts, journal: Journal, on_tensor: OnTensor) -> None:
    """Writes what the journal does not have."""
    config, plan, tensors = job.config, job.plan, job.plan.tensors
    device = default_device()
    total = len(plan.copied) + len(plan.quantized) + bool(config.kv_cache == "fp8")
    written = parts.stored()
    modules = stored_modules(written)

    def told(name: str, digests: dict[str, str], numbers: dict[str, Any]) -> None:
        journal.add(name, digests, numbers)
        on_tensor(len(journal.entries), total, name)

    def quantize(module: Module, inputs: Moments | None) -> None:
        source_RK = tensors.tensor(f"{module.name}.weight").to(device)
        weight = quantize_weight(
            source_RK,
            module.precision,
            amax[module.name],
            method=config.method,
            rule=config.rule,
            inputs=inputs,
            reciprocal=config.layout == "modelopt",
        )
        input_amax = inputs.input_amax if inputs is not None and job.activations else None
        encoded = job.layout.encode(module.name, weight, input_amax)
        digests = {name: parts.write(name, [tensor]) for name, tensor in encoded.items()}
        size = sum(parts.tensors[name].num_bytes for name in encoded)
        reached = {} if inputs is None else {CALIBRATION_TOKENS: inputs.rows}
        about = {"precision": module.precision, "bytes": size} | reached
        told(module.name, digests, about | statistics(weight, source_RK))

    def visit(found: Mapping[str, Moments]) -> dict[str, Tensor]:
        """Quantizes the modules of one layer, and gives the values that it goes on with."""
        for name, inputs in found.items():
            if name not in journal.entries:
                quantize(plan.modules[name], inputs)
        if config.method != "gptq":
            return {}
        return {f"{name}.weight": dequantized(written, modules[name], torch.float32) for name in found}

    for name in plan.copied:
        if name not in journal.entries:
            told(name, {name: parts.write(name, tensors.row_chunks(name, max_bytes=CHUNK_BYTES))}, {})
    if config.kv_cache == "fp8" and "kv_cache" not in journal.entries:
        scales = job.layout.cache_scales(plan.attention)
        told("kv_cache", {name: parts.write(name, [tensor]) for name, tensor in scales.items()}, {})
    left = [name for name in plan.quantized if name not in journal.entries]
    if job.rows is None:
        for name in left:
            quantize(plan.modules[name], None)
    elif left:
        exact = config.method == "gptq"
        model = LayerwiseModel(tensors, device)
        # What is written already is looked at again: GPTQ goes on from it, and unreached experts take over what their
        # siblings saw.
        calibrate(model, job.rows.token_ids, list(plan.quantized), visit, hessian=exact, replacing=exact)


def _written(plan: Plan, layout: Layout, config: QuantConfig) -> dict[str, Stored]:
    """All tensors of the new checkpoint, in the order of the old one."""
    quantized = plan.quantized
    found: dict[str, Stored] = {}
    for tensor, place in plan.tensors.places.items():
        module = quantized.get(tensor.removesuffix(".weight"))
        if module is not None:
            activations = config.act == "dynamic"
            found |= layout.stored(module.name, module.shape, module.precision, activations=activations)
        elif tensor not in plan.tied:
            found[tensor] = Stored(place.dtype, place.shape)
    if config.kv_cache == "fp8":
        for name, scale in layout.cache_scales(plan.attention).items():
            found[name] = Stored(scale.dtype, tuple(scale.shape))
    if taken := sorted(found.keys() & (plan.tensors.places.keys() - plan.copied) - {f"{n}.weight" for n in quantized}):
        raise InputError(f"model {plan.tensors.path}: {taken[0]} is there already; the checkpoint is quantized")
    return found


# ------------------------------------------------------------------------------------------------------------ assembly


def _assemble(job: Job, record: Mapping[str, Any], parts: Parts, journal: Journal, folder: Path) -> None:
    """Puts the checkpoint together: weights, index, configuration, provenance, and all other files of the source."""
    source = Path(job.plan.tensors.path)
    carry_over(source, folder)
    parts.place_in(folder)
    quantized = {name: module.precision for name, module in job.plan.quantized.items()}
    block = job.layout.quantization_config(
        quantized, job.plan.kept, activations=job.activations, kv_cache=job.config.kv_cache == "fp8"
    )
    write_json(folder / "config.json", read_json(source / "config.json") | {"quantization_config": block})
    for name, document in job.layout.documents(block).items():
        write_json(folder / name, document)
    write_json(folder / PROVENANCE, _provenance(job, record, journal))


def carry_over(source: Path, folder: Path) -> None:
    """Copies what lies beside the weights of a checkpoint, such as its tokenizer, but what tells how it was made."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix not in _WEIGHTS and file.name not in _MADE and not file.name.startswith("."):
            shutil.copyfile(file, folder / file.name)


def _provenance(job: Job, record: Mapping[str, Any], journal: Journal) -> dict[str, Any]:
    kept = {name: module.kept for name, module in job.plan.modules.items() if module.precision == "bf16"}
    modules = {name: journal.entries[name]["statistics"] for name in job.plan.quantized}
    return {
        "schema": "mopdctl.quantization/1",
        **record,
        "versions": package_versions(),
        "warnings": [*warnings(job.plan, job.config), *_unreached(modules)],
        "tied": job.plan.tied,
        "kept": kept,
        "modules": modules,
    }


def _unreached(modules: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Experts that were quantized without calibration, for no token of it was routed to them."""
    names = [name for name, about in modules.items() if about.get(CALIBRATION_TOKENS) == 0]
    if names:
        calibrated = sum(CALIBRATION_TOKENS in about for about in modules.values())
        yield (
            f"no calibration token reached {len(names)} of {calibrated} weights ({', '.join(names[:3])}"
            f"{', ...' if len(names) > 3 else ''}): what they read is unknown, and any scale of their inputs is that "
            "of their siblings; give more rows, or rows of what these experts are for"
        )


def _record(job: Job) -> dict[str, Any]:
    """What decides the bytes: the settings and the digest of the source."""
    settings = job.config.model_dump(mode="json", exclude={"name", "model", "tp", "description", "calibration"})
    record = {"source": model_identity(job.plan.tensors.path), "settings": settings}
    return record | ({"calibration": job.rows.document} if job.rows is not None else {})


def _settings(config: QuantConfig, target: Path) -> dict[str, Any]:
    names = {"model", "format", "act", "method", "kv_cache", "layout"}
    return {"name": config.name, "checkpoint": str(target)} | config.model_dump(mode="json", include=names)


def local_folder(path: str) -> Path:
    """The folder of a model: as it is, or that of a hub id, which is downloaded whole."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]))
    except (OSError, ValueError) as error:
        raise InputError(f"model {path}: {str(error).splitlines()[0]}") from None
