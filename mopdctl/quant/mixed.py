"""`bits`: the precision of each layer by how much the model minds, as the rules of a recipe."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from mopdctl.config.quant import Precision, PrecisionRule, QuantConfig
from mopdctl.fp4.fp8 import dequantize_fp8
from mopdctl.fp4.quantized import dequantize
from mopdctl.quant.budget import allocate, decision_groups, precision_rules
from mopdctl.quant.layerwise import LayerwiseModel
from mopdctl.quant.plan import Plan
from mopdctl.quant.sensitivity import sensitivities
from mopdctl.quant.tensor import Fp8, quantize_weight

ROWS, TOKENS = 128, 512
"""Most rows of the calibration that gradients are taken on, for costs to an eighth, and most tokens of each."""


def mixed_precision(
    config: QuantConfig,
    plan: Plan,
    amax: Mapping[str, float],
    rows: Sequence[Sequence[int]],
    device: torch.device,
    *,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[PrecisionRule], dict[str, Any]]:
    """The rules that keep `config.bits` at the least estimated KL, to be put after those of the configuration.

    Costs are those of `config.method`, and for GPTQ, whose rounding hangs on the layers before, those of `sweep`.

    Args:
        config: with `bits`.
        plan: of the configuration without such rules.
        amax: module to the largest magnitude of all weights that share its tensor scale.
        rows: token ids.
        device: where the model runs.
        on_layer: told how many layers of how many are done.

    Returns:
        The rules, and what they were decided on, as JSON: costs of every group in nats a token, and the gap.

    Raises:
        InputError: the budget is too small, or the model cannot run layer by layer.
    """
    assert config.bits is not None
    groups = decision_groups(plan, config)

    def quantized(name: str, precision: Precision) -> Tensor:
        weight_RK = plan.tensors.tensor(f"{name}.weight").to(device)
        method = "sweep" if config.method == "gptq" else config.method
        found = quantize_weight(weight_RK, precision, amax[name], method=method, rule=config.rule)
        return dequantize_fp8(found.codes_RK, found.scale) if isinstance(found, Fp8) else dequantize(found)

    elements = {name: group.elements for name, group in groups.items()}
    costs = {name: dict.fromkeys(group.candidates, 0.0) for name, group in groups.items()}
    allocate(costs, elements, config.bits)  # a budget that nothing fits into is told before the work
    free = {name: group for name, group in groups.items() if len(group.candidates) > 1}
    if free:
        candidates = next(iter(free.values())).candidates
        some = [row[:TOKENS] for row in rows[:ROWS]]
        modules = {name: group.modules for name, group in free.items()}
        model = LayerwiseModel(plan.tensors, device)
        costs |= sensitivities(model, some, modules, candidates, quantized, on_layer=on_layer)
    found = allocate(costs, elements, config.bits)
    document = asdict(found) | {"bits": config.bits, "costs_nats": {name: costs[name] for name in free}}
    return precision_rules(found, groups, config.format), document
