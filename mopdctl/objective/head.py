"""The output head of a language model: what turns a hidden state into logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mopdctl.errors import InputError


@dataclass(frozen=True, slots=True)
class Head:
    """The last layer, with the two ways in which models bend its output.

        z      = scale * (hidden @ weight^T + bias)
        logits = z                                   without a softcap
        logits = softcap * tanh(z / softcap)         with one

    Source: `scale` as in Cohere's `logit_scale` and the inverse of Granite's `logits_scaling`; `softcap` as in the
    Gemma 2 report, section 2 ("logit soft-capping").
    """

    weight_VH: Tensor
    """[rows, H]. There may be more rows than the vocabulary has tokens (a padded embedding)."""
    bias_V: Tensor | None = None
    """[rows]."""
    scale: float = 1.0
    softcap: float | None = None
    """Above 0; None leaves the logits unbounded."""

    def __post_init__(self) -> None:
        if self.weight_VH.dim() != 2:
            raise InputError(f"head: weight has shape {tuple(self.weight_VH.shape)}; give one of [vocabulary, width]")
        if self.bias_V is not None and self.bias_V.shape != self.weight_VH.shape[:1]:
            raise InputError(
                f"head: bias of shape {tuple(self.bias_V.shape)} beside {len(self.weight_VH)} rows; give one per row"
            )
        if self.softcap is not None and not self.softcap > 0:
            raise InputError(f"head: softcap {self.softcap:g}; give one above 0, or None for no cap")


def head_logits(hidden_NH: Tensor, head: Head, *, vocab_size: int) -> Tensor:
    """All logits at once, [N, vocab_size]; gradient flows to hidden states, weight and bias.

    The plain form, for few tokens and as the reference of `chunked_divergence`: its memory grows with N x V.

    Args:
        hidden_NH: hidden states as the head takes them, after the model's last norm.
        head: of the same model.
        vocab_size: tokens of the vocabulary; rows of the head past it take no part.
    """
    check_head(hidden_NH, head, vocab_size=vocab_size, whose="policy")
    bias_V = None if head.bias_V is None else head.bias_V[:vocab_size]
    logits_NV = torch.nn.functional.linear(hidden_NH, head.weight_VH[:vocab_size], bias_V) * head.scale
    return logits_NV if head.softcap is None else head.softcap * torch.tanh(logits_NV / head.softcap)


def check_head(hidden_NH: Tensor, head: Head, *, vocab_size: int, whose: str) -> None:
    """Raises InputError unless head and hidden states fit each other and cover the vocabulary."""
    rows, width = head.weight_VH.shape
    if hidden_NH.dim() != 2 or hidden_NH.shape[1] != width:
        raise InputError(
            f"{whose} head: hidden states of shape {tuple(hidden_NH.shape)} for a head of width {width}; "
            "give [tokens, width] of the same model"
        )
    if rows < vocab_size:
        raise InputError(f"{whose} head: {rows} rows for a vocabulary of {vocab_size}; give a head that covers it")


def bend_(product_CV: Tensor, head: Head, bias_V: Tensor | None) -> Tensor:
    """Makes logits of the bare product in place: bias, scale, softcap. `bias_V` as wide as the product."""
    if bias_V is not None:
        product_CV.add_(bias_V)
    if head.scale != 1.0:
        product_CV.mul_(head.scale)
    if head.softcap is not None:
        product_CV.div_(head.softcap).tanh_().mul_(head.softcap)
    return product_CV


def unbend_(gradient_CV: Tensor, logits_CV: Tensor, head: Head) -> Tensor:
    """The softcap's chain rule in place, d logits / d z = 1 - (logits / softcap)^2. The scale is left to the caller."""
    if head.softcap is not None:
        gradient_CV.mul_(1 - (logits_CV / head.softcap).square_())
    return gradient_CV
