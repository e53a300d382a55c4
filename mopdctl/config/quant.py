"""How `mopdctl quantize` quantizes a checkpoint, and the recipes that say it for a kind of model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from mopdctl.config.base import Strict, load_yaml, parse
from mopdctl.errors import InputError

Precision = Literal["nvfp4", "mxfp4", "fp8", "bf16"]
"""Of one weight. `fp8` is E4M3 with one scale for the matrix; `bf16` leaves the weight as it is, in its own dtype."""

Format = Literal["nvfp4", "mxfp4", "fp8"]
Method = Literal["max", "46", "sweep", "gptq"]
ExponentRule = Literal["even", "floor", "rceil", "ceil"]
Layout = Literal["compressed-tensors", "modelopt"]


class PrecisionRule(Strict):
    """The precision of the modules that a pattern matches."""

    match: str = Field(min_length=1)
    """A module as it is called in the safetensors files, without `.weight`: its name, a glob (`*.mlp.*`), or `re:` and
    a regular expression that matches from the beginning."""
    precision: Precision
    """What its weight is stored as."""


class Recipe(Strict):
    """What is quantized and how: the part of a configuration that suits more than one checkpoint."""

    description: str = ""
    """Which models it is for, and where it comes from."""
    format: Format = "nvfp4"
    """Precision of every linear layer that nothing else is said of."""
    act: Literal["none", "dynamic"] = "none"
    """`dynamic` has the engine quantize what goes into these layers as well, with scales that it takes at run time."""
    method: Method = "sweep"
    """How block scales are chosen: by the largest magnitude; four-over-six; the best of neighbouring scales; GPTQ."""
    rule: ExponentRule = "even"
    """MXFP4: how the largest magnitude of a block becomes its exponent."""
    kv_cache: Literal["none", "fp8"] = "none"
    """`fp8` has the engine keep keys and values in E4M3."""
    ignore: list[str] = []
    """Modules that stay as they are: patterns as in `rules`."""
    rules: list[PrecisionRule] = []
    """Precision by module; the first that matches counts, after `ignore`. Embeddings, routers, convolutions and what
    transformers does not know stay as they are; the output head is quantized only where a rule names it in full."""
    fused: list[Annotated[list[str], Field(min_length=2)]] = []
    """Last names of sibling layers that read one input and that an engine may fuse, beside those that are known
    (q/k/v, gate/up, w1/w3, q_a/kv_a): they get one tensor scale. `[to_q, to_k, to_v]`."""


class CalibrationConfig(Strict):
    """Text that is run through the model to see what its layers read."""

    data: Path | None = None
    """JSONL rows of `messages` or `text`."""
    store: str | None = None
    """A rollout store in the workspace: prompts and answers as their tokens were stored."""
    samples: int = Field(default=128, gt=0)
    """Rows, spread evenly over all that there are."""
    max_length: int = Field(default=2048, gt=1)
    """Tokens at which a row is cut off."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.data is None) == (self.store is None):
            raise ValueError("needs either `data` or `store`: one of them says where the text comes from")
        return self


class QuantConfig(Recipe):
    """One checkpoint to quantize."""

    model: str
    """A name in the workspace, a folder (relative to this file) or a hub id."""
    name: str
    """Name of the checkpoint to make."""
    layout: Layout = "compressed-tensors"
    """Names and dtypes of the tensors, and the configuration block beside them."""
    bits: float | None = Field(default=None, gt=4, le=16)
    """Bits per element over all weights that can be quantized: the precision of each layer is then chosen by how much
    the model minds, instead of `format` for all."""
    tp: list[Annotated[int, Field(ge=1)]] = []
    """Tensor-parallel sizes that the checkpoint will be served with; shapes are checked for each."""
    calibration: CalibrationConfig | None = None
    """Needed by `gptq`, by `bits` and by NVFP4 activations; `sweep` weighs errors by it where it is given."""
    max_shard_gb: float = Field(default=2.0, gt=0)
    """Most that one safetensors file holds, in 10^9 bytes; a larger tensor gets a file of its own."""

    @property
    def precisions(self) -> set[Precision]:
        """All that `format` and `rules` ask for."""
        return {self.format, *(rule.precision for rule in self.rules)} - {"bf16"}

    @property
    def needs_input_scales(self) -> bool:
        """Whether checkpoints hold a scale of what goes into some layer, so that it has to be measured."""
        static: set[Precision] = {"nvfp4"} if self.layout == "compressed-tensors" else {"nvfp4", "fp8"}
        return self.act == "dynamic" and bool(static & self.precisions)

    @model_validator(mode="after")
    def _settings_that_fit_together(self) -> Self:
        if self.method == "46" and "nvfp4" not in self.precisions:
            raise ValueError("method `46` chooses scales of NVFP4, and nothing here is NVFP4; use `max` or `sweep`")
        if self.rule != "even" and "mxfp4" not in self.precisions:
            raise ValueError("`rule` is about exponents of MXFP4, and nothing here is MXFP4; leave it out")
        if self.layout == "modelopt" and "mxfp4" in self.precisions:
            raise ValueError("no engine loads MXFP4 in the modelopt layout; use `layout: compressed-tensors`")
        if self.layout == "modelopt" and "fp8" in self.precisions and self.act == "none":
            raise ValueError("FP8 in the modelopt layout needs input scales; use `act: dynamic`, or compressed-tensors")
        needs = {
            "method `gptq`": self.method == "gptq",
            "`bits`": self.bits is not None,
            "`act: dynamic`": self.needs_input_scales,
        }
        if self.calibration is None:
            if wanting := [what for what, needed in needs.items() if needed]:
                raise ValueError(f"{wanting[0]} needs `calibration`: rows of text to run through the model")
        elif not any(needs.values()) and self.method != "sweep":
            raise ValueError(f"nothing uses `calibration` with method `{self.method}`; leave it out or use `sweep`")
        return self


def load_recipe(source: str) -> Recipe:
    """A recipe file, or one that ships with mopdctl by its name. Raises InputError for neither, and for a bad one."""
    path = Path(source)
    if not path.is_file():
        if source not in shipped_recipes():
            raise InputError(f"recipe {source!r}: neither a file nor one that ships: {', '.join(shipped_recipes())}")
        path = _RECIPES / f"{source}.yaml"
    return parse(Recipe, load_yaml(path), source=str(path))


def load_quant(
    path: Path | None, options: Mapping[str, Any], *, recipe: str | None = None, ignore: Sequence[str] = ()
) -> QuantConfig:
    """A configuration from a recipe, a file over it, and options (None means not given) over both.

    `ignore` goes on top of what recipe and file ignore. Raises InputError for whatever the model refuses.
    """
    document = load_recipe(recipe).model_dump(mode="json", exclude_unset=True) if recipe else {}
    document |= load_yaml(path) if path else {}
    given = {key: value for key, value in options.items() if value is not None}
    if isinstance(document.get("calibration"), dict) and "calibration" in given:
        given["calibration"] = document["calibration"] | given["calibration"]
    document |= given
    if ignore:
        document["ignore"] = [*(document.get("ignore") or []), *ignore]
    return parse(QuantConfig, document, source=str(path) if path and not given else "quantize")


def shipped_recipes() -> list[str]:
    """Names of the recipes that ship with mopdctl."""
    return sorted(path.stem for path in _RECIPES.glob("*.yaml"))


_RECIPES = Path(__file__).resolve().parents[1] / "quant" / "recipes"
