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
    "sampled-bent": {"extrapolation": 1.25, "advantage_clip": 2.0},
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
        "top_k": 32,
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
PLAIN = ("sampled-bent", "bent-twice", "jsd-union-bucket")
"""Those in which every part of the others stands; the others are slow tests."""


def family(document: Document, name: str, *, steps: int) -> dict[str, Any]:
    """Every step has all 24 prompts, so that what is learnt is not left to the draw."""
    per_prompt = 4 if name in SAMPLED else 1
    return document(steps=steps, batch_size=24, samples_per_prompt=per_prompt, learning_rate=3e-3, **FAMILY[name])


@pytest.fixture(scope="module")
def plain(distil: Distil, teachers_document: Document) -> dict[str, SimpleNamespace]:
    """Two plain steps with either kind of objective."""
    return {o: distil(teachers_document(objective=o)) for o in ("sampled", "exact")}


@pytest.fixture(scope="module")
def first_answers(distil: Distil, teachers_document: Document) -> list[dict[str, Any]]:
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
        logprobs = []
        for path in (policy, tiny / "models" / domain):
            model = HFModel.load(str(path))
            logits_BRV = response_logits(model.model, layout, vocab_size=model.vocab_size)
            logprobs.append(torch.log_softmax(logits_BRV[layout.present_BR].detach().double(), -1))
        policy_NV, teacher_NV = logprobs
        total += float((policy_NV.exp() * (policy_NV - teacher_NV)).sum())
        count += len(policy_NV)
    return total / count


def assert_same_bits(one: SimpleNamespace, other: SimpleNamespace, *, ignore: str = "none") -> None:
    """`ignore` is how the names of metrics begin that only one of them has."""
    assert [{k: v for k, v in row.items() if not k.startswith(ignore)} for row in other.metrics] == one.metrics
    assert other.rollouts == one.rollouts
    assert all(other.weights[name].equal(weight) for name, weight in one.weights.items())


# ------------------------------------------------------------------------------------------------------------ learning


@pytest.mark.parametrize(
    "name", [name if name in PLAIN else pytest.param(name, marks=pytest.mark.slow) for name in FAMILY]
)
def test_every_objective_brings_the_student_closer_and_does_so_again(
    tiny: Path, distil: Distil, teachers_document: Document, first_answers: list[dict[str, Any]], name: str
) -> None:
    # verl #7540: one seed, one curve
    run = distil(family(teachers_document, name, steps=3))
    before, after = (exact_kl(tiny, p, first_answers) for p in (tiny / "models" / "student", run.checkpoint))
    assert 0.4 < before < 0.6
    assert after < (0.9 if name in SAMPLED else 0.8) * before
    again = distil(family(teachers_document, name, steps=1))
    assert again.metrics == run.metrics[:1]
    assert again.rollouts == run.rollouts[:1]
    # AReaL KDRL: a loss whose gradient lacks the teacher; no two objectives are one
    assert run.card["algorithm"] == f"mopd/{FAMILY[name].get('objective', 'sampled')}"


def test_no_two_objectives_have_one_gradient(distil: Distil, teachers_document: Document) -> None:
    # TRL #5731, NeMo-RL: settings that nobody reads
    names = ("sampled", "sampled-extrapolated", "sampled-trust-region", "reverse", "forward", "jsd", "entropy-aware")
    names += ("reverse_kl-student-bucket", "reverse_kl-teacher-bucket")
    norms = [
        distil(teachers_document(steps=1, batch_size=6, **FAMILY[name])).metrics[0]["train/grad_norm"] for name in names
    ]
    assert all(abs(a - b) > 1e-3 * a for i, a in enumerate(norms) for b in norms[:i])


# ------------------------------------------------------------------------------------------------------ what is neutral

NEUTRAL: dict[str, tuple[str, dict[str, Any]]] = {
    "sampled": (
        "sampled",
        {"extrapolation": 1.0, "trust_region": 1.0, "outcome_weight": 0.0, "advantage_clip": 1e6}
        | {"anchor": {"kl_weight": 0.0, "sft_weight": 0.0}, "teacher_residency": "one", "balance": {"mode": "fixed"}},
    ),
    "exact": (
        "exact",
        {"divergence": "reverse_kl", "extrapolation": 1.0, "trust_region": 1.0, "entropy_aware_weight": 0.0}
        | {"entropy_aware_nats": 0.1, "anchor": {}, "teacher_hidden": "memory", "teacher_residency": "one"},
    ),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_modifiers_at_their_neutral_values_change_no_bit(
    plain: dict[str, SimpleNamespace], distil: Distil, teachers_document: Document, name: str
) -> None:
    objective, neutral = NEUTRAL[name]
    assert_same_bits(plain[objective], distil(teachers_document(objective=objective, **neutral)))


@pytest.mark.parametrize("objective", ["sampled", "exact"])
def test_observing_the_balance_changes_no_bit(
    plain: dict[str, SimpleNamespace], distil: Distil, teachers_document: Document, objective: str
) -> None:
    # DN-MOPD: a mode that proves that the hook reduces to the run without it
    run = distil(teachers_document(objective=objective, balance={"mode": "observe", "memory": 0.0}))
    assert_same_bits(plain[objective], run, ignore="balance/")
    first, second = run.metrics
    assert first["balance/factor"] == second["balance/factor"] == dict.fromkeys(DOMAINS, 1.0)
    assert first["balance/share_factor"] == first["balance/factor"]
    # undamped, a factor is the target (equal here) over the share that was measured, with mean 1
    inverse = {d: 1 / share for d, share in first["policy/grad_share"].items()}
    expected = {d: 3 * value / sum(inverse.values()) for d, value in inverse.items()}
    assert second["balance/share_factor"] == pytest.approx(expected, rel=1e-6)
    assert ("balance/sigma_nats" in first) == (objective == "sampled")


def test_all_of_the_vocabulary_as_candidates_is_the_whole_divergence(
    plain: dict[str, SimpleNamespace], distil: Distil, teachers_document: Document
) -> None:
    for support in ("student", "union"):
        row = distil(teachers_document(steps=1, objective="top_k", top_k=512, top_k_support=support)).metrics[0]
        whole = plain["exact"].metrics[0]
        assert row["train/loss"] == pytest.approx(whole["train/loss"], abs=FLOAT32)
        assert row["train/grad_norm"] == pytest.approx(whole["train/grad_norm"], rel=1e-4)
        assert row["distill/reverse_kl_top_512_nats"] == pytest.approx(whole["distill/kl_exact_nats"], abs=FLOAT32)


@pytest.mark.parametrize(
    "change", [{"chunk_tokens": 1}, {"gradient_accumulation": 5}, {"gradient_checkpointing": True}]
)
def test_neither_chunks_nor_micro_batches_change_the_step(
    plain: dict[str, SimpleNamespace], distil: Distil, teachers_document: Document, change: dict[str, Any]
) -> None:
    # TRL #6006, verl #7225
    row, whole = distil(teachers_document(steps=1, objective="exact", **change)).metrics[0], plain["exact"].metrics[0]
    assert row["train/loss"] == pytest.approx(whole["train/loss"], abs=FLOAT32)
    assert row["train/grad_norm"] == pytest.approx(whole["train/grad_norm"], rel=1e-4)


def test_the_icepop_mask_gates_the_exact_divergence(distil: Distil, teachers_document: Document) -> None:
    # asked for by many, offered by nobody: off-policy correction with a divergence over the vocabulary
    stale = {"staleness": 1, "learning_rate": 1e-2, "grad_share_every": 1, "steps": 2}
    free = distil(teachers_document(objective="exact", **stale)).metrics[1]
    none = distil(teachers_document(objective="exact", **stale, correction_low=0.0, correction_high=1e-9)).metrics[1]
    tight = distil(teachers_document(objective="exact", **stale, correction_low=0.9, correction_high=1.1)).metrics[1]
    assert free["train/grad_norm"] > 0
    assert (none["train/loss"], none["train/grad_norm"]) == (0, 0)
    assert none["policy/kept_fraction"] == dict.fromkeys(DOMAINS, 0.0)
    assert all(0 < kept < 1 for kept in tight["policy/kept_fraction"].values())
    assert 0 < tight["train/loss"] < free["train/loss"]


# ------------------------------------------------------------------------------------------ names and order of teachers


@pytest.mark.parametrize("name", ["forward", pytest.param("jsd-union-bucket", marks=pytest.mark.slow)])
def test_two_aliases_of_a_checkpoint_are_one_teacher(distil: Distil, teachers_document: Document, name: str) -> None:
    # verl-omni: two entries of one checkpoint
    document = teachers_document(steps=1, **FAMILY[name])
    model = document["teachers"]["arithmetic"]["model"]
    document["teachers"]["structured"]["model"] = model
    (apart,) = distil(document).metrics
    document["teachers"] = {
        "both": {"model": model, "domains": ["arithmetic", "structured"]},
        "tools": document["teachers"]["tools"],
    }
    (together,) = distil(document).metrics
    assert together["train/loss"] == pytest.approx(apart["train/loss"], abs=FLOAT32)
    assert together["train/grad_norm"] == pytest.approx(apart["train/grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    "train",
    [
        {"objective": "exact", "teacher_hidden": "store", "teacher_residency": "one", "balance": {"mode": "share"}},
        pytest.param(
            {"balance": {"mode": "sigma"}, "extrapolation": 1.25, "anchor": {"kl_weight": 0.1}}, marks=pytest.mark.slow
        ),
    ],
    ids=["exact", "sampled"],
)
def test_the_order_of_teachers_in_the_file_means_nothing(
    distil: Distil, teachers_document: Document, train: dict[str, Any]
) -> None:
    # Open-MOPD fork: the first teacher configured otherwise than the rest, teachers bound to domains by position
    warm_up = {"steps": 1, "wrong": "keep", "samples": 4}
    document = teachers_document(warm_up=warm_up, grad_share_every=1, max_new_tokens=24, **train)
    for number, teacher in enumerate(document["teachers"].values(), 1):
        teacher |= {"sampling_weight": float(number), "weight": 1 / number}
    one = distil(document)
    document["teachers"] = dict(reversed(document["teachers"].items()))
    other = distil(document)
    assert_same_bits(one, other)
    assert [list(row["balance/factor"]) for row in other.metrics] == [DOMAINS] * 2
    assert other.card["fingerprint"] == one.card["fingerprint"]
    warm = [read_metrics(Workspace(r.folder.parents[1]).run("merged") / "warm-up") for r in (one, other)]
    assert [row["train/loss"] for row in warm[0]] == [row["train/loss"] for row in warm[1]]
