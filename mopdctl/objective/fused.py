"""What one block of rows gives, in plain torch: its figures, and the gradient left where the target's logits were."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mopdctl.objective.divergence import Divergence, Target
from mopdctl.objective.reverse_kl import reverse_kl

_BLOCK_ELEMENTS = 1 << 22
"""Logits of one row block: 16 MB in float32, so that most of it stays in the cache from one pass to the next."""
_BLOCK_ROWS = 64
"""Rows of one block at least: at the end of each pass threads wait for each other, on a busy computer for long."""


@dataclass(frozen=True, slots=True)
class RowFigures:
    """One value per row, all constant, in the logits' dtype."""

    value_C: Tensor
    policy_logprobs_C: Tensor
    """Of the sampled tokens."""
    target_logprobs_C: Tensor
    """Of the sampled tokens, under the teacher itself: before a target is made of it."""
    entropy_C: Tensor


Rows = Callable[[Tensor, Tensor, Tensor | None, Tensor], RowFigures]
"""(policy_logits_CV, target_logits_CV, reference_logits_CV or None, tokens_C) -> figures.

Overwrites the target's logits with d value / d policy logits. Leaves the policy's logits as they are.
"""


def row_block(vocab_size: int, device: torch.device) -> int:
    """Rows that are worked on together: few enough for the cache of a CPU if that is not too few, all elsewhere."""
    return max(_BLOCK_ROWS, _BLOCK_ELEMENTS // vocab_size) if device.type == "cpu" else 1 << 30


def rows_of(of: Divergence, target: Target | None) -> Rows:
    """The row function of an objective: the fused one for reverse KL from the teacher itself, else the general one."""
    return _ReverseKL() if of is reverse_kl and target is None else _general(of, target)


def _general(of: Divergence, target: Target | None) -> Rows:
    """Any divergence from any target, by its definition."""

    def rows(
        policy_logits_CV: Tensor, target_logits_CV: Tensor, reference_logits_CV: Tensor | None, tokens_C: Tensor
    ) -> RowFigures:
        policy_CV = torch.log_softmax(policy_logits_CV, dim=-1)
        teacher_CV = torch.log_softmax(target_logits_CV, dim=-1)
        reference_CV = None if reference_logits_CV is None else torch.log_softmax(reference_logits_CV, dim=-1)
        figures = RowFigures(
            value_C=policy_CV.new_empty(len(tokens_C)),
            policy_logprobs_C=_at(policy_CV, tokens_C),
            target_logprobs_C=_at(teacher_CV, tokens_C),
            # A probability of zero contributes zero: 0 * -inf would be NaN.
            entropy_C=-(policy_CV.exp() * policy_CV.clamp(min=torch.finfo(policy_CV.dtype).min)).sum(dim=-1),
        )
        target_CV = teacher_CV if target is None else target(teacher_CV, policy_CV, reference_CV)
        value_C, gradient_CV = of(policy_CV, target_CV)
        figures.value_C.copy_(value_C)
        target_logits_CV.copy_(gradient_CV)
        return figures

    return rows


class _ReverseKL:
    """Reverse KL in nine passes and two scratch blocks, from the raw logits s and t.

        p = softmax(s),  d = s - t,  c = sum p d
        KL = c - lse(s) + lse(t),  entropy = lse(s) - sum p s,  gradient = p d - c p

    log p - log q differs from d by a constant that the gradient takes away again, so that log q is never needed whole.
    """

    def __init__(self) -> None:
        self._scratch: list[Tensor] = []

    def __call__(
        self, policy_logits_CV: Tensor, target_logits_CV: Tensor, reference_logits_CV: Tensor | None, tokens_C: Tensor
    ) -> RowFigures:
        s_CV, t_CV = policy_logits_CV, target_logits_CV
        p_CV, product_CV = self._blocks(s_CV)
        lse_t_C = _log_sum_exp(t_CV, log_softmax=product_CV)
        lse_s_C = _log_sum_exp(s_CV, log_softmax=p_CV)
        p_CV.exp_()
        torch.sub(s_CV, t_CV, out=product_CV).mul_(p_CV)
        c_C = product_CV.sum(dim=-1)
        if not torch.isfinite(c_C).all():
            # Somewhere a probability is zero on one side, or there is no number at all: by the definition.
            return _general(reverse_kl, None)(s_CV, t_CV, None, tokens_C)
        target_logprobs_C = _at(t_CV, tokens_C) - lse_t_C
        torch.addcmul(product_CV, p_CV, c_C.unsqueeze(-1), value=-1, out=t_CV)
        entropy_C = lse_s_C - p_CV.mul_(s_CV).sum(dim=-1)
        return RowFigures(c_C - lse_s_C + lse_t_C, _at(s_CV, tokens_C) - lse_s_C, target_logprobs_C, entropy_C)

    def _blocks(self, like_CV: Tensor) -> list[Tensor]:
        if not self._scratch or len(self._scratch[0]) < len(like_CV):
            self._scratch = [torch.empty_like(like_CV), torch.empty_like(like_CV)]
        return [block[: len(like_CV)] for block in self._scratch]


def _log_sum_exp(logits_CV: Tensor, *, log_softmax: Tensor) -> Tensor:
    """The log-sum-exp of each row, which any logit less its own log-softmax is; leaves that in `log_softmax`."""
    torch.log_softmax(logits_CV, dim=-1, out=log_softmax)
    return logits_CV[:, 0] - log_softmax[:, 0]


def _at(values_CV: Tensor, tokens_C: Tensor) -> Tensor:
    return values_CV.gather(1, tokens_C.unsqueeze(-1)).squeeze(-1)
