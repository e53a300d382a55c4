"""How quantized weights are called and stored beside each other, and the configuration that says so."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor

from mopdctl.config.quant import Layout as LayoutName
from mopdctl.config.quant import Precision
from mopdctl.quant.layouts import compressed_tensors, modelopt
from mopdctl.quant.tensor import QuantizedWeight
from mopdctl.quant.write import Stored


class Layout(Protocol):
    """What each module of this package has."""

    def stored(
        self, name: str, shape: tuple[int, int], precision: Precision, *, activations: bool
    ) -> dict[str, Stored]:
        """The tensors of one module: name to dtype and shape."""

    def encode(self, name: str, weight: QuantizedWeight, input_amax: float | None) -> dict[str, Tensor]:
        """The tensors of one module. `input_amax` is the largest input, where `stored` has a tensor for it."""

    def cache_scales(self, attention: Iterable[str]) -> dict[str, Tensor]:
        """Unit scales of FP8 keys and values for each attention module, where engines look for them."""

    def quantization_config(
        self, quantized: Mapping[str, Precision], kept: Iterable[str], *, activations: bool, kv_cache: bool
    ) -> dict[str, Any]:
        """The `quantization_config` of config.json.

        Args:
            quantized: module to precision.
            kept: modules with a matrix that is not quantized.
            activations: whether what goes into quantized layers is quantized too.
            kv_cache: whether keys and values are kept in FP8.
        """

    def documents(self, quantization_config: Mapping[str, Any]) -> dict[str, Any]:
        """Further JSON files of the checkpoint, by name."""


LAYOUTS: dict[LayoutName, Layout] = {"compressed-tensors": compressed_tensors, "modelopt": modelopt}
