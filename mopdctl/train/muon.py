"""Muon for hidden matrices: momentum, orthogonalised by Newton-Schulz, in float32.

`torch.optim.Muon` (2.11-2.13) does the same in bfloat16 whatever the parameters are; without bfloat16 instructions that
is ten times slower than the rest of a step. Matrices of one shape are orthogonalised together.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum.

        M <- mu M + G;   W <- W (1 - lr wd) - lr * 0.2 sqrt(max(rows, columns)) * NS(G + mu M)

    The factor gives updates the root mean square of AdamW's, so that one learning rate serves both. Sources: Jordan et
    al., "Muon" (2024), quintic coefficients; Moonshot AI, "Muon is scalable for LLM training" (2025), the factor.
    """

    def __init__(
        self, params: Iterable[torch.nn.Parameter], *, lr: float, weight_decay: float = 0.0, momentum: float = 0.95
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                directions = []
                for parameter in parameters:
                    gradient = parameter.grad
                    assert gradient is not None
                    state = self.state[parameter]
                    buffer = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
                    buffer.mul_(group["momentum"]).add_(gradient)
                    directions.append(gradient.add(buffer, alpha=group["momentum"]))
                updates = orthogonalise(torch.stack(directions).float())
                factor = group["lr"] * 0.2 * max(shape) ** 0.5
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update.to(parameter.dtype), alpha=-factor)


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix of each of a stack [K, rows, columns], roughly: singular values near 1."""
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x if wide else x.mT
