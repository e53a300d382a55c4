"""What is special to the generalized JSD; values and gradients against references are in test_divergence.py."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.objective.forward_kl import forward_kl
from mopdctl.objective.jsd import jsd
from mopdctl.objective.reverse_kl import reverse_kl


def logprobs(seed: int, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    policy, target = (scale * torch.randn(2, 6, 12, dtype=torch.float64, generator=generator)).log_softmax(-1)
    return policy, target


def test_value_by_hand() -> None:
    policy, target = torch.tensor([[0.25, 0.75]]).double(), torch.tensor([[0.5, 0.5]]).double()
    # M = 0.2 q + 0.8 p = (0.3, 0.7)
    want = 0.2 * (0.5 * math.log(0.5 / 0.3) + 0.5 * math.log(0.5 / 0.7)) + 0.8 * (
        0.25 * math.log(0.25 / 0.3) + 0.75 * math.log(0.75 / 0.7)
    )
    assert float(jsd(0.2)(policy.log(), target.log())[0]) == pytest.approx(want, rel=1e-13)


# TRL #5731: the weight of a mixture applied the wrong way round in one of two paths
def test_a_small_share_gives_the_forward_kl_and_a_large_one_the_reverse() -> None:
    policy, target = logprobs(0, 1.0)
    for of, share, weight in ((forward_kl, 1e-6, 1e-6), (reverse_kl, 1 - 1e-6, 1e-6)):
        for got, want in zip(jsd(share)(policy, target), of(policy, target), strict=True):
            # what is left is of the order of the weight times a chi-squared, here below a hundred
            torch.testing.assert_close(got / weight, want, rtol=1e-3, atol=1e-3)
    forward, reverse = forward_kl(policy, target)[0], reverse_kl(policy, target)[0]
    assert (forward - reverse).abs().min() > 0.01  # the two could not be mistaken for each other


def test_exchanging_the_sides_exchanges_the_shares() -> None:
    policy, target = logprobs(1)
    torch.testing.assert_close(jsd(0.2)(policy, target)[0], jsd(0.8)(target, policy)[0], rtol=1e-12, atol=1e-15)
    assert (jsd(0.2)(policy, target)[0] - jsd(0.8)(policy, target)[0]).abs().min() > 1e-4


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.01, 0.99), st.sampled_from([0.1, 3.0, 60.0]))
def test_it_lies_between_zero_and_the_entropy_of_the_shares(seed: int, share: float, scale: float) -> None:
    value = jsd(share)(*logprobs(seed, scale))[0]
    bound = -share * math.log(share) - (1 - share) * math.log(1 - share)
    assert (value >= -1e-14).all()
    assert (value <= bound + 1e-12).all()


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_a_share_at_or_beyond_an_end_is_refused(share: float) -> None:
    with pytest.raises(InputError, match="strictly between 0 and 1"):
        jsd(share)
