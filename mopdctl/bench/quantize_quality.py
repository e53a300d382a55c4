"""The quality part of the quantize bench: the model that it is measured on, and how far a checkpoint is from it."""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mopdctl.bench.frame import Bar, Case
from mopdctl.bench.quantize_rivals import sides
from mopdctl.cli.output import note
from mopdctl.config.quant import QuantConfig
from mopdctl.engines.fp4 import dequantized, stored_modules
from mopdctl.engines.weights import open_tensors
from mopdctl.files import fingerprint
from mopdctl.quant.compare import Comparing, compare
from mopdctl.quant.run import quantize_model
from mopdctl.runs import Workspace
from mopdctl.world.text_model import Size, train_text_model, write_text

SETTINGS: dict[str, dict[str, Any]] = {
    "nvfp4 max": {"method": "max"},
    "nvfp4 46": {"method": "46"},
    "nvfp4 sweep": {"method": "sweep"},
    "nvfp4 sweep, weighted": {"method": "sweep", "calibrated": True},
    "nvfp4 gptq": {"method": "gptq", "calibrated": True},
    "nvfp4 w4a4 max": {"method": "max", "act": "dynamic", "calibrated": True},
    "nvfp4 w4a4 46": {"method": "46", "act": "dynamic", "calibrated": True},
    "nvfp4 w4a4 sweep, weighted": {"method": "sweep", "act": "dynamic", "calibrated": True},
    "nvfp4 w4a4 gptq": {"method": "gptq", "act": "dynamic", "calibrated": True},
    "mxfp4 max": {"format": "mxfp4", "method": "max"},
    "mxfp4 sweep": {"format": "mxfp4", "method": "sweep"},
    "mxfp4 sweep, weighted": {"format": "mxfp4", "method": "sweep", "calibrated": True},
    "mxfp4 gptq": {"format": "mxfp4", "method": "gptq", "calibrated": True},
    "mxfp4 w4a4 max": {"format": "mxfp4", "method": "max", "act": "dynamic"},
    "mxfp4 w4a4 gptq": {"format": "mxfp4", "method": "gptq", "act": "dynamic", "calibrated": True},
}
"""What is asked of `mopdctl quantize`, by the name that it goes by here."""

BETTER = [
    ("nvfp4 sweep", "nvfp4 max"),
    ("nvfp4 46", "nvfp4 max"),
    ("nvfp4 gptq", "nvfp4 sweep"),
    ("nvfp4 w4a4 gptq", "nvfp4 w4a4 max"),
    ("mxfp4 sweep", "mxfp4 max"),
    ("mxfp4 gptq", "mxfp4 sweep"),
    ("mxfp4 w4a4 gptq", "mxfp4 w4a4 max"),
]
"""Which is to have the lower KL of which."""

SHOWN = [
    ("nvfp4 sweep, weighted", "nvfp4 sweep"),
    ("mxfp4 sweep, weighted", "mxfp4 sweep"),
    ("mxfp4 max", "nvfp4 max"),
    ("mxfp4 gptq", "nvfp4 gptq"),
]
"""Whose KL is shown beside whose, whichever is lower."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The model, and text of its kind that it has not seen."""

    model: Path
    held_out: Path
    calibration: Path


@dataclass(frozen=True, slots=True)
class Figures:
    """How far a quantized checkpoint is from its source."""

    relative_mse: float
    """Of the weights: squared error over squared weight, over all matrices."""
    kl_nats: float
    """KL(full || quantized) per token, over held-out text."""
    kl_stderr: float
    top1_agreement: float
    perplexity: float
    perplexity_full: float


def subject(size: Size, cache: Path, *, held_out_rows: int, model: Path | None = None) -> Subject:
    """The model and rows of text; in `cache` lie the text and, where none is given, the model: trained on first use."""
    folder = model or cache / f"text-model-{fingerprint(list(size))}"
    found = Subject(folder, cache / f"held-out-{held_out_rows}.jsonl", cache / f"calibration-{sides.ROWS}.jsonl")
    if model is None and not (folder / "config.json").is_file():
        note(f"training the model to quantize, {size.steps} steps: {folder}")
        train_text_model(
            folder, size, on_step=lambda step, row: note(f"step {step}/{size.steps}: loss {row['train/loss']:.3f}")
        )
    write_text(found.held_out, "test", held_out_rows)
    write_text(found.calibration, "train", sides.ROWS)
    return found


def figures(on: Subject, checkpoint: Path) -> Figures:
    """Measures what is on disk, with weights dequantized in float32."""
    how = Comparing(sources=(str(on.held_out),), rows=1_000_000, max_length=sides.LENGTH)
    text = compare(str(on.model), str(checkpoint), how, Workspace(checkpoint.parent), base=Path())["text"]
    kl = text["kl_nats"]
    return Figures(
        relative_mse(on.model, checkpoint),
        kl["mean"],
        kl["stderr"],
        text["top1_agreement"]["mean"],
        text["perplexity_quantized"],
        text["perplexity_full"],
    )


def relative_mse(model: Path, checkpoint: Path) -> float:
    """Squared error over squared weight of all quantized matrices, in float64."""
    full, quantized = open_tensors(str(model)), open_tensors(str(checkpoint))
    error = weight = 0.0
    for name, module in stored_modules(quantized).items():
        source = full.tensor(f"{name}.weight").double()
        error += float((dequantized(quantized, module, torch.float32).double() - source).square().sum())
        weight += float(source.square().sum())
    return error / weight


class Table:
    """Checkpoints of one model by our settings, made and measured when they are first asked for."""

    def __init__(self, on: Subject, held: ExitStack) -> None:
        self._on = on
        self._workspace = Workspace(Path(held.enter_context(tempfile.TemporaryDirectory(prefix="mopdctl-bench-"))))
        self._found: dict[str, Figures] = {}

    def __getitem__(self, name: str) -> Figures:
        """The figures of the setting of that name."""
        if name not in self._found:
            made = quantize_model(self._config(name), self._workspace, base=Path())
            self.add(name, made)
        return self._found[name]

    def add(self, name: str, checkpoint: Path) -> None:
        """Measures a checkpoint that is there already."""
        found = self._found[name] = figures(self._on, checkpoint)
        note(
            f"{name}: perplexity {found.perplexity:.4f} (full {found.perplexity_full:.4f}), KL {found.kl_nats:.6f} "
            f"+- {found.kl_stderr:.6f} nats, top-1 {found.top1_agreement:.4%}, weights {found.relative_mse:.6f}"
        )

    def _config(self, name: str) -> QuantConfig:
        document: dict[str, Any] = {"model": str(self._on.model), "name": name.replace(" ", "-").replace(",", "")}
        document |= {key: value for key, value in SETTINGS[name].items() if key != "calibrated"}
        if SETTINGS[name].get("calibrated"):
            source = {"data": str(self._on.calibration), "samples": sides.ROWS, "max_length": sides.LENGTH}
            document["calibration"] = source
        return QuantConfig.model_validate(document)


def quality_cases(table: Table) -> list[Case]:
    """KL of settings beside each other; then the perplexity of each beside that of the full model, to be seen."""

    def kl(name: str) -> Callable[[], float]:
        return lambda: table[name].kl_nats

    def perplexity(name: str, field: str) -> Callable[[], float]:
        return lambda: float(getattr(table[name], field))

    beside = [
        Case(f"KL, {ours} | {other}", "nats", kl(ours), kl(other), bar, 1)
        for pairs, bar in ((BETTER, Bar(ratio_at_least=1)), (SHOWN, None))
        for ours, other in pairs
    ]
    shown = [
        Case(
            f"perplexity, {name} | full model",
            "",
            perplexity(name, "perplexity"),
            perplexity(name, "perplexity_full"),
            None,
            1,
        )
        for name in SETTINGS
    ]
    return beside + shown
