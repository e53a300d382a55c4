"""The anchor: what keeps the policy near a frozen model, for instance itself before training."""

from torch import Tensor

from mopdctl.objective.divergence import at_least_float32


def sampled_anchor(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """A per-token term whose expected gradient is that of KL(p_theta || p_ref), for tokens sampled from the policy.

        k2_t = (log p_theta(y_t) - log p_ref(y_t))^2 / 2
        E_{y ~ p_theta}[ grad k2_t ] = E[ (log p_theta - log p_ref) grad log p_theta ] = grad KL(p_theta || p_ref)

    The trap: an estimate with the right expectation need not have the right gradient. In a loss, k1 has the expected
    gradient 0 (the reference drops out), and k3 = e^d - 1 - d, d = log p_ref - log p_theta, has
    E[(1 - e^d) grad log p_theta] = grad KL(p_ref || p_theta), the other direction. k2 has the right gradient but not
    the value: as a figure report `kl.kl_k3`, as a loss use this. The exact form over the whole vocabulary is
    `divergence(policy_logits, reference_logits, of=reverse_kl)`.

    Tokens from a stale sampler need the correction weight, as every sampled term does.

    Args:
        policy_logprobs: log p_theta(y_t) in nats at temperature 1, any shape; carries the gradient.
        reference_logprobs: same shape; constant.

    Returns:
        float32 or wider, same shape, >= 0; exactly 0, with gradient 0, where both are equal.

    Source: Schulman, "Approximating KL divergence" (2020) for k1, k2, k3; Tang and Munos, "On a few pitfalls in KL
    divergence gradient estimation for RL" (2025) for their gradients.
    """
    gap = at_least_float32(policy_logprobs) - at_least_float32(reference_logprobs.detach())
    return gap.square() / 2
