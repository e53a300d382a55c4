"""What every divergence of the policy from a target is, and how one becomes a loss that carries a gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mopdctl.errors import InputError

Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(policy_logprobs_NV, target_logprobs_NV) -> (value_N in nats, gradient_NV = d value_N / d policy LOGITS).

Both inputs are normalised log-probabilities, constant, in float32 or float64, and may hold -inf; neither is changed.
The gradient is in closed form and takes the target as constant. Every divergence here keeps three promises:

- an outcome that has probability zero on both sides adds nothing to the value and has gradient 0;
- where the two inputs are equal bit for bit, value and gradient are exactly 0. The gradient that autograd composes
  leaves rounding there, which Adam would divide by its own size;
- a row depends on no other row.
"""

Target = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(teacher_logprobs_NV, policy_logprobs_NV, reference_logprobs_NV or None) -> target_logprobs_NV.

What the policy is pulled towards when it is not the teacher itself: normalised, and constant, the policy in it too.
May be one of its inputs itself: change neither in place.
"""


def divergence(
    policy_logits_NV: Tensor, target_logits_NV: Tensor, of: Divergence, *, temperature: float = 1.0
) -> Tensor:
    """A divergence of softmax(policy / T) from softmax(target / T), per token, with its gradient.

    Args:
        policy_logits_NV: logits, the vocabulary last; any leading shape. Carries the gradient.
        target_logits_NV: same shape; receives no gradient.
        of: which one, e.g. `reverse_kl` or `jsd(0.5)`.
        temperature: T > 0, on both sides. The gradient shrinks with 1/T; no factor T^2 makes up for it.

    Returns:
        value_N in nats, float32 or wider. Where a probability of zero makes it infinite its gradient is no number:
        refuse such a token before the backward pass.

    Raises:
        InputError: for a temperature that is not above 0.
    """
    if not temperature > 0:
        raise InputError(f"temperature {temperature}: the softmax needs one above 0; give e.g. 1.0")
    policy_NV, target_NV = at_least_float32(policy_logits_NV), at_least_float32(target_logits_NV.detach())
    value_N: Tensor = _Divergence.apply(policy_NV, target_NV, of, temperature)  # type: ignore[no-untyped-call]
    return value_N


def at_least_float32(x: Tensor) -> Tensor:
    """Float64 stays; everything else is widened to float32."""
    return x if x.dtype == torch.float64 else x.float()


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, policy_NV: Tensor, target_NV: Tensor, of: Divergence, temperature: float) -> Tensor:
        policy_logprobs_NV, target_logprobs_NV = (
            torch.log_softmax(logits_NV / temperature if temperature != 1.0 else logits_NV, dim=-1)
            for logits_NV in (policy_NV, target_NV)
        )
        value_N, gradient_NV = of(policy_logprobs_NV, target_logprobs_NV)
        ctx.save_for_backward(gradient_NV)
        ctx.temperature = temperature
        return value_N

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient_NV,) = ctx.saved_tensors
        return (gradient_N / ctx.temperature).unsqueeze(-1) * gradient_NV, None, None, None
