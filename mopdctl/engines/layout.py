"""How sequences become rectangular batches: prompts padded on the left, responses on the right.

All responses then begin in one column, so that a model needs to project only the last columns to logits. Row t of those
scores response token t. Dimensions: B sequences, P prompt columns, R response columns, T = P + R, V vocabulary.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mopdctl.engines.head import hidden_states
from mopdctl.errors import InputError


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
    packed: bool = False
    """Whether positions restart at each of several sequences in the one row. The model tells them apart by that."""


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


def lay_out_pack(sequences: Sequence[Sequence[int]], *, device: torch.device) -> Layout:
    """Sequences one after another in a single row, B = 1 and P = 1. Raises ValueError if one of them is empty.

    The first token of each is no response: what comes before it belongs to another. Only for models that
    `check_keeps_apart` accepts.
    """
    if not all(len(s) for s in sequences):
        raise ValueError("an empty sequence in a pack")
    input_ids = torch.tensor([token for s in sequences for token in s], device=device).unsqueeze(0)
    position_ids = torch.cat([torch.arange(len(s), device=device) for s in sequences]).unsqueeze(0)
    return Layout(
        input_ids_BT=input_ids,
        attention_mask_BT=torch.ones_like(input_ids),
        position_ids_BT=position_ids,
        response_BR=input_ids[:, 1:],
        present_BR=position_ids[:, 1:] > 0,
        packed=True,
    )


def check_keeps_apart(model: Any) -> None:
    """Raises InputError if sequences of one row see each other in this model, or if it does not take positions.

    Transformers builds a block-diagonal attention mask where positions restart and no mask is given, but not every
    model asks for it, and recurrent layers and convolutions go on from one sequence into the next. So a short sequence
    is run beside two different ones and alone.
    """
    what = f"model {model.name_or_path}: {type(model).__name__}"
    trouble = "packing would train on another text; use `packing: none`"
    known = inspect.signature(model.forward).parameters
    if "position_ids" not in known or "logits_to_keep" not in known:
        raise InputError(f"{what} takes no `position_ids` or no `logits_to_keep`, so {trouble}")
    device = next(model.parameters()).device
    one, other, own = list(range(1, 9)), list(range(8, 0, -1)), list(range(4, 0, -1))
    last = torch.arange(len(one), len(one) + len(own), device=device)
    with torch.no_grad():
        beside_one, beside_other = (_logits(model, lay_out_pack([s, own], device=device), last) for s in (one, other))
        alone = _logits(model, lay_out_pack([own], device=device), len(own))
    # Between neighbours not even the rounding differs, unless an expert layer sorts tokens; alone it does.
    leak, change = (float((beside_one - logits).abs().max() / alone.std()) for logits in (beside_other, alone))
    if leak > 1e-5 or change > 1e-2:
        raise InputError(f"{what} mixes sequences of one row, so {trouble}")


def response_logits(model: Any, layout: Layout, *, vocab_size: int) -> Tensor:
    """The logits [B, R, V] that predict the response tokens, cut to the first `vocab_size` real entries.

    Embedding matrices are often padded beyond the tokenizer; those rows belong to no token.
    """
    num_response = layout.response_BR.shape[1]
    return _logits(model, layout, num_response + 1)[:, -(num_response + 1) : -1, :vocab_size]


def active_logits(model: Any, layout: Layout, active_BR: Tensor, *, vocab_size: int) -> Tensor:
    """The logits [N, V] that predict the active response tokens. Of a pack, no others are ever computed."""
    if not layout.packed:
        return response_logits(model, layout, vocab_size=vocab_size)[active_BR]
    # response column r is predicted from row column r, because P = 1
    return _logits(model, layout, active_BR[0].nonzero().squeeze(-1))[0, :, :vocab_size]


def active_hidden(model: Any, layout: Layout, active_BR: Tensor) -> Tensor:
    """The last hidden states [N, H] that predict the active response tokens; no others ever reach a head."""
    hidden_BTH = hidden_states(
        model,
        input_ids=layout.input_ids_BT,
        attention_mask=None if layout.packed else layout.attention_mask_BT,
        position_ids=layout.position_ids_BT,
    )
    num_response = layout.response_BR.shape[1]
    found: Tensor = hidden_BTH[:, -(num_response + 1) : -1][active_BR]
    return found


def _logits(model: Any, layout: Layout, logits_to_keep: int | Tensor) -> Tensor:
    found: Tensor = model(
        input_ids=layout.input_ids_BT,
        attention_mask=None if layout.packed else layout.attention_mask_BT,
        position_ids=layout.position_ids_BT,
        logits_to_keep=logits_to_keep,
        use_cache=False,
    ).logits
    return found


def token_logprobs(logits_NV: Tensor, tokens_N: Tensor) -> Tensor:
    """Log p(token) at temperature 1 over the last dimension, in float32 (float64 stays float64)."""
    logits = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    picked = logits.gather(-1, tokens_N.unsqueeze(-1)).squeeze(-1)
    return picked - torch.logsumexp(logits, dim=-1)
