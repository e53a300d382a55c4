"""A divergence over a few likely tokens instead of the whole vocabulary."""

from typing import Literal

import torch
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.objective.divergence import Divergence

Support = Literal["student", "teacher", "union"]
Tail = Literal["bucket", "renormalize"]


def top_k(of: Divergence, k: int, *, support: Support = "teacher", tail: Tail = "bucket") -> Divergence:
    """Any divergence of the two distributions after both are cut to the candidates S.

        bucket:       outcomes S + {rest}, P_rest = sum of p_v outside S
                      g_v = G_v inside S,  g_v = (p_v / P_rest) G_rest outside
        renormalize:  outcomes S alone, each divided by its sum over S
                      g_v = G_v inside S,  0 outside

    G is the gradient of the divergence of the cut distributions with respect to their own logits.

    `bucket` is never above the full divergence, grows with S, and is the full divergence, bit for bit, for k >= V. The
    gradient flows through all candidates and the rest, so that mass cannot leave S unseen: a sum over S of truncated
    probabilities without the rest falls when the student empties S. `renormalize` compares the shape within S alone and
    does not see how much mass the student has there.

    Args:
        of: `reverse_kl`, `forward_kl` or `jsd(share)`.
        k: how many of the likeliest tokens each side names.
        support: whose likeliest tokens are S: the `student`'s, the `teacher`'s (the target's), or the `union` of both
            (between k and 2k tokens).
        tail: what becomes of the other tokens.

    Returns:
        The divergence; its gradient is dense, [N, V].

    Raises:
        InputError: for k < 1, and for k = 1 with `renormalize`: one token has probability 1 on both sides, always.

    Source: MOPD (2606.30406) for the teacher's top-k; "Revisiting OPD" (2603.25562) for renormalising; the rest as one
    more outcome as in TRL's tail bucket.
    """
    if k < 1:
        raise InputError(f"top_k k={k}: needs at least 1 token; give a k of e.g. 64")
    if k == 1 and tail == "renormalize":
        raise InputError("top_k k=1 with tail=renormalize: one token alone always gives 0; take k >= 2 or tail=bucket")

    def value_and_gradient(policy_logprobs_NV: Tensor, target_logprobs_NV: Tensor) -> tuple[Tensor, Tensor]:
        if k >= policy_logprobs_NV.shape[-1]:
            return of(policy_logprobs_NV, target_logprobs_NV)
        tokens_NK, repeated_NK = _candidates(policy_logprobs_NV, target_logprobs_NV, k, support)
        cut = _with_rest if tail == "bucket" else _renormalized
        policy_NK = cut(policy_logprobs_NV, tokens_NK, repeated_NK)
        target_NK = cut(target_logprobs_NV, tokens_NK, repeated_NK)
        value_N, gradient_NK = of(policy_NK, target_NK)
        gradient_NV = torch.zeros_like(policy_logprobs_NV)
        if tail == "bucket":
            rest_N1 = policy_NK[..., -1:]
            share_NV = torch.exp(policy_logprobs_NV - rest_N1).masked_fill_(torch.isneginf(rest_N1), 0.0)
            gradient_NV = share_NV.mul_(gradient_NK[..., -1:]).scatter_(-1, tokens_NK, 0.0)
            gradient_NK = gradient_NK[..., :-1]
        # A repeated candidate has probability 0 on both sides, so its gradient is 0 and adds nothing.
        return value_N, gradient_NV.scatter_add_(-1, tokens_NK, gradient_NK)

    return value_and_gradient


def _candidates(policy_NV: Tensor, target_NV: Tensor, k: int, support: Support) -> tuple[Tensor, Tensor]:
    """Token ids [N, K] in order, and which of them repeat the one before."""
    sides = {"student": [policy_NV], "teacher": [target_NV], "union": [policy_NV, target_NV]}[support]
    tokens_NK = torch.cat([side_NV.topk(k, dim=-1).indices for side_NV in sides], dim=-1).sort(dim=-1).values
    repeated_NK = torch.zeros_like(tokens_NK, dtype=torch.bool)
    repeated_NK[..., 1:] = tokens_NK[..., 1:] == tokens_NK[..., :-1]
    return tokens_NK, repeated_NK


def _with_rest(logprobs_NV: Tensor, tokens_NK: Tensor, repeated_NK: Tensor) -> Tensor:
    # The rest from the tokens outside, for 1 - sum has no digits left where it is small.
    rest_N1 = logprobs_NV.scatter(-1, tokens_NK, -torch.inf).logsumexp(dim=-1, keepdim=True)
    inside_NK = logprobs_NV.gather(-1, tokens_NK).masked_fill_(repeated_NK, -torch.inf)
    return torch.cat([inside_NK, rest_N1], dim=-1)


def _renormalized(logprobs_NV: Tensor, tokens_NK: Tensor, repeated_NK: Tensor) -> Tensor:
    inside_NK = logprobs_NV.gather(-1, tokens_NK).masked_fill_(repeated_NK, -torch.inf)
    return torch.log_softmax(inside_NK, dim=-1)
