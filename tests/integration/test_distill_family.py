"""The family of objectives in the loop: each one teaches, and at its neutral values each is the plain one to the bit.

FLOAT32 is what summing the same float32 terms in another order may change in a loss here.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mopdctl.engines.hf import HFModel
from mopdctl.engines.layout import lay_out, response_logits
from mopdctl.runs import Workspace, read_metrics

Document = Callable[..., dict[str, Any]]
Distil = Callable[..., SimpleNamespace]

FLOAT32 = 1e-5
DOMAINS = ["arithmetic", "structured", "tools"]
ENTROPY_AWARE = {"entropy_aware_weight": 0.5, "entropy_aware_nats": 1.0, "entropy_aware_top_k": 4}
SAMPLED: dict[str, dict[str, Any]] = {
    "sampled": {},
    "sampled-extrapolated": {"extrapolation": 1.25},
    "sampled-trust-region": {"trust_region": 0.5},
    "sampled-bent-twice": {"extrapolation": 1.25, "trust_region": 0.9, "advantage_clip": 2.0},
    "sampled-anchored": {"anchor": {"kl_weight": 0.1}},
}
EXACT: dict[str, dict[str, Any]] = {
    "reverse": {"objective": "exact"},
    "forward": {"objective": "exact", "divergence": "forward_kl"},
    "jsd": {"objective": "exact", "divergence": "jsd", "jsd_teacher_share": 0.3},
    "extrapolated": {"objective": "exact", "extrapolation": 1.25},
    "trust-region": {"objective": "exact", "trust_region": 0.5},
    "bent-twice": {"objective": "exact", "divergence": "forward_kl", "extrapolation": 1.25, "trust_region": 0.5},
    "entropy-aware": {"objective": "exact", **ENTROPY_AWARE},
    "anchored": {"objective": "exact", "anchor": {"kl_weight": 0.1}},
}
TOP_K: dict[str, dict[str, Any]] = {
    f"{divergence}-{support}-{tail}": {
        "objective": "top_k",
        "top_k": 8,
        "divergence": divergence,
        "top_k_support": support,
        "top_k_tail": tail,
    }
    for divergence, support, tail in (
        ("reverse_kl", "student", "bucket"),
        ("reverse_kl", "teacher", "bucket"),
        ("reverse_kl", "union", "renormalize"),
        ("forward_kl", "teacher", "bucket"),
        ("forward_kl", "student", "renormalize"),
        ("jsd", "union", "bucket"),
    )
}
FAMILY = SAMPLED | EXACT | TOP_K


def family(document: Document, name: str, *, steps: int) -> dict[str, Any]:
    """Every step has all 24 prompts, so that what is learnt is not left to the draw."""
    per_prompt = 6 if name in SAMPLED else 1
    return document(steps=steps, batch_size=24, samples_per_prompt=per_prompt, learning_rate=3e-3, **FAMILY[name])


@pytest.fixture(scope="module")
def untrained(distil: Distil, teachers_document: Document) -> list[dict[str, Any]]:
    """Answers of the untrained student to all prompts."""
    return distil(teachers_document(steps=1, batch_size=24)).rollouts[0]


def exact_kl(tiny: Path, policy: Path, rollouts: list[dict[str, Any]]) -> float:
    """Mean KL(policy || routed teacher) in nats at the prefixes of some answers, in float64 over all of the logits."""
    total = count = 0.0
    for domain in DOMAINS:
        mine = [r for r in rollouts if r["teacher_id"] == domain]
        layout = lay_out(
            [r["prompt_ids"] for r in mine], [r["response_ids"] for r in mine], pad_id=0, device=torch.device("cpu")
        )
        one, other = (
            torch.log_softmax(
                response_logits(model.model, layout, vocab_size=model.vocab_size)[layout.present_BR].detach().double(),
                -1,
            )
            for model in (HFModel.load(str(path)) for path in (policy, tiny / "models" / domain))
        )
        total += float((one.exp() * (one - other)).sum())
        count += len(one)
    return total / count


@pytest.mark.parametrize("name", FAMILY)
def test_every_objective_brings_the_student_closer_and_does_so_again(
    tiny: Path, distil: Distil, teachers_document: Document, untrained: list[dict[str, Any]], name: str
) -> None:
    run = distil(family(teachers_document, name, steps=4))
    before = exact_kl(tiny, tiny / "models" / "student", untrained)
    after = exact_kl(tiny, run.checkpoint, untrained)
    print(name, before, after)  # noqa
    assert after < 0.9 * before
    again = distil(family(teachers_document, name, steps=2))
    assert again.metrics == run.metrics[:2]
    assert again.rollouts == run.rollouts[:2]
