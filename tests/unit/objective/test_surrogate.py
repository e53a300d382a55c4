import math

import pytest
import torch

from mopdctl.objective.surrogate import clipped_surrogate

LOW, HIGH = 0.2, 0.28


def at(ratio: float, advantage: float) -> tuple[float, float, float]:
    """(J, gradient with respect to the policy's log-probability, clipped) at one ratio of policy to prox."""
    prox = torch.tensor([-1.0], dtype=torch.float64)
    policy = (prox + math.log(ratio)).requires_grad_()
    surrogate, clipped = clipped_surrogate(policy, prox, torch.tensor([advantage]), clip_low=LOW, clip_high=HIGH)
    surrogate.sum().backward()
    assert policy.grad is not None
    return surrogate.item(), policy.grad.item(), clipped.item()


# The four corners: only moving further in the direction that the advantage already rewarded is cut off.
@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient", "clipped"),
    [
        (1.5, 2.0, (1 + HIGH) * 2.0, 0.0, 1.0),
        (0.5, 2.0, 0.5 * 2.0, 0.5 * 2.0, 0.0),
        (1.5, -2.0, 1.5 * -2.0, 1.5 * -2.0, 0.0),
        (0.5, -2.0, (1 - LOW) * -2.0, 0.0, 1.0),
        (1.1, 2.0, 1.1 * 2.0, 1.1 * 2.0, 0.0),
        (0.9, 2.0, 0.9 * 2.0, 0.9 * 2.0, 0.0),
        (1.1, -2.0, 1.1 * -2.0, 1.1 * -2.0, 0.0),
        (0.9, -2.0, 0.9 * -2.0, 0.9 * -2.0, 0.0),
    ],
)
def test_value_and_gradient_at_every_corner(
    ratio: float, advantage: float, value: float, gradient: float, clipped: float
) -> None:
    # the ratio is a float32
    assert at(ratio, advantage) == pytest.approx((value, gradient, clipped), rel=1e-6, abs=0.0)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_one_step_per_batch_leaves_exactly_the_policy_gradient(advantage: float) -> None:
    assert at(1.0, advantage) == (advantage, advantage, 0.0)


def test_gradient_is_the_finite_difference_on_both_sides_of_each_bound() -> None:
    step = 1e-3
    for advantage in (2.0, -2.0):
        for bound in (1 - LOW, 1 + HIGH):
            for ratio in (bound - 0.02, bound + 0.02):
                up, down = at(ratio * math.exp(step), advantage)[0], at(ratio * math.exp(-step), advantage)[0]
                # float32 values of about 2 over a step of 1e-3 carry an error of about 2e-4
                assert at(ratio, advantage)[1] == pytest.approx((up - down) / (2 * step), abs=1e-3)


def test_the_two_sides_have_bounds_of_their_own() -> None:
    surrogate, clipped = clipped_surrogate(
        torch.tensor([1.25, 1.25, 0.75, 0.75]).log(),
        torch.zeros(4),
        torch.tensor([1.0, -1.0, 1.0, -1.0]),
        clip_low=0.1,
        clip_high=0.5,
    )
    torch.testing.assert_close(surrogate, torch.tensor([1.25, -1.25, 0.75, -0.9]), rtol=1e-6, atol=0.0)
    assert clipped.tolist() == [0.0, 0.0, 0.0, 1.0]


def test_an_advantage_of_zero_has_no_gradient_and_is_not_called_clipped() -> None:
    for ratio in (0.5, 1.0, 1.5):
        assert at(ratio, 0.0) == (0.0, 0.0, 0.0)


def test_no_gradient_flows_into_an_advantage_that_the_caller_did_not_detach() -> None:
    policy = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantage = torch.tensor([1.0, -1.0], requires_grad=True)
    surrogate, _ = clipped_surrogate(policy, policy.detach(), advantage, clip_low=LOW, clip_high=HIGH)
    surrogate.sum().backward()
    assert advantage.grad is None
