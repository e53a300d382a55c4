"""A model split in two: the backbone that gives hidden states, and the head that makes logits of them."""

from typing import Any

import torch
from torch import Tensor, nn

from mopdctl.errors import InputError
from mopdctl.objective.head import Head, head_logits

_PROBE = [1, 2, 3, 5, 8]
_TOLERANCE = 1e-2
"""Of the logits' standard deviation: bfloat16 rounds far less, a forgotten scale differs far more."""


def backbone(model: Any) -> Any:
    """The part of a causal language model that ends with the last norm. Its `last_hidden_state` feeds the head."""
    return model.base_model


def output_head(model: Any) -> Head:
    """The head of a causal language model, its parameters as they are (a gradient reaches them).

    What a model does to its logits after the product (`logit_scale`, `logits_scaling`, `final_logit_softcapping`) is
    read from its configuration, and the whole is held against the model's own logits on a few tokens: a model that
    does anything else is refused rather than trained on another distribution.

    Raises:
        InputError: hidden states and head do not give the model's logits, or those are no numbers.
    """
    head = _head(model)
    rows = head.weight_VH.shape[0]
    ids = torch.tensor([_PROBE], device=head.weight_VH.device) % rows
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits[0].float()
        found = head_logits(hidden_states(model, input_ids=ids)[0], head, vocab_size=rows).float()
    if not bool(torch.isfinite(expected).all()):
        raise InputError(
            f"model {model.name_or_path}: its logits are no numbers (NaN or infinite); a weight is damaged"
        )
    if float((found - expected).abs().max()) > _TOLERANCE * float(expected.std()):
        raise InputError(
            f"model {model.name_or_path}: {type(model).__name__} does more to its logits than product, bias, scale and "
            "soft-capping, so that losses over the whole vocabulary cannot be taken from hidden states; use "
            "`objective: sampled`"
        )
    return head


def hidden_states(model: Any, **inputs: Any) -> Tensor:
    """The last hidden states [B, T, H], after the final norm."""
    found: Tensor = backbone(model)(**inputs, use_cache=False).last_hidden_state
    return found


def _head(model: Any) -> Head:
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise InputError(
            f"model {model.name_or_path}: its head is a {type(layer).__name__}, not a linear layer; "
            "use `objective: sampled`"
        )
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(layer.weight, layer.bias, scale, float(softcap) if softcap else None)
