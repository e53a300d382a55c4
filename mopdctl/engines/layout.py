"""How sequences become rectangular batches: prompts padded on the left, responses on the right.

All responses then begin in one column, so that a model needs to project only the last columns to logits. Row t of those
scores response token t. Dimensions: B sequences, P prompt columns, R response columns, T = P + R, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """A padded batch of (prompt, response) pairs."""

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    position_ids_BT: Tensor
    response_BR: Tensor
    """Response token ids, padding included."""
    present_BR: Tensor
    """True where a response token is real, not padding."""


def lay_out(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], *, pad_id: int, device: torch.device
) -> Layout:
    """Pads pairs into one batch. Every prompt needs at least one token (else ValueError); responses may be empty."""
    if not all(prompts):
        raise ValueError("an empty prompt: its first response token would be predicted from padding")
    num_prompt = max(len(p) for p in prompts)
    num_response = max((len(r) for r in responses), default=0)
    rows, masks = [], []
    for prompt, response in zip(prompts, responses, strict=True):
        left, right = num_prompt - len(prompt), num_response - len(response)
        rows.append([pad_id] * left + list(prompt) + list(response) + [pad_id] * right)
        masks.append([0] * left + [1] * (len(prompt) + len(response)) + [0] * right)
    input_ids = torch.tensor(rows, device=device)
    mask = torch.tensor(masks, device=device)
    return Layout(
        input_ids_BT=input_ids,
        attention_mask_BT=mask,
        position_ids_BT=(mask.cumsum(-1) - 1).clamp(min=0),
        response_BR=input_ids[:, num_prompt:],
        present_BR=mask[:, num_prompt:].bool(),
    )


def response_logits(model: Any, layout: Layout, *, vocab_size: int) -> Tensor:
    """The logits [B, R, V] that predict the response tokens, cut to the first `vocab_size` real entries.

    Embedding matrices are often padded beyond the tokenizer; those rows belong to no token.
    """
    num_response = layout.response_BR.shape[1]
    logits = model(
        input_ids=layout.input_ids_BT,
        attention_mask=layout.attention_mask_BT,
        position_ids=layout.position_ids_BT,
        logits_to_keep=num_response + 1,
        use_cache=False,
    ).logits
    return logits[:, -(num_response + 1) : -1, :vocab_size]


def token_logprobs(logits_NV: Tensor, tokens_N: Tensor) -> Tensor:
    """Log p(token) at temperature 1 over the last dimension, in float32 (float64 stays float64)."""
    logits = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    picked = logits.gather(-1, tokens_N.unsqueeze(-1)).squeeze(-1)
    return picked - torch.logsumexp(logits, dim=-1)
