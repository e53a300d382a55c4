"""Whether teachers come from the student, or from elsewhere: what their weights say of it."""

import torch

from mopdctl.distill.merging.sources import Sources

_SMALLEST = 1e-12


@torch.no_grad()
def mean_cosine(sources: Sources) -> float | None:
    """The mean cosine between what different teachers changed in the student's weights, all tensors as one vector.

        delta_i = theta_i - theta_student,    mean over i < j of <delta_i, delta_j> / (|delta_i| |delta_j|)

    Near 0 for teachers that were forked from the student and learned different things. Teachers that were made from
    another checkpoint all lack what the student learned since, and share that direction: a sum of their deltas would
    take it away several times over.

    Returns:
        In [-1, 1]; None for fewer than two teachers that differ from the student.

    Source: near-orthogonal task vectors, "Editing models with task arithmetic" (2212.04089), section 5.
    """
    count = len(sources.teachers)
    products = torch.zeros(count, count, dtype=torch.float64)
    for name in sources.student.shapes:
        start = sources.student.tensor(name)
        if start.is_floating_point():
            deltas = torch.stack([(one.weights.tensor(name) - start).flatten() for one in sources.teachers])
            products += deltas @ deltas.T
    norms = products.diagonal().sqrt()
    moved = [i for i in range(count) if norms[i] > _SMALLEST]
    if len(moved) < 2:
        return None
    cosines = (products / norms.clamp(min=_SMALLEST) / norms.clamp(min=_SMALLEST).unsqueeze(-1))[moved][:, moved]
    pairs = torch.triu_indices(len(moved), len(moved), offset=1)
    return float(cosines[pairs[0], pairs[1]].mean())
