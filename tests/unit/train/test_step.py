"""Loss and gradient of one optimizer step against a reference: each sequence alone, unpadded, float64.

The numbers of tokens are powers of two, so that the float32 coefficients are exact and EXACT can hold: rounding of
float64 sums whose terms reach about 10.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mopdctl.engines.hf import HFModel
from mopdctl.engines.layout import token_logprobs
from mopdctl.objective.advantage import distillation_advantage
from mopdctl.objective.correction import correction_weight, staleness_ratio
from mopdctl.objective.reduction import Reduction
from mopdctl.objective.surrogate import clipped_surrogate
from mopdctl.train.batch import MicroBatch, TrainSequence, cut
from mopdctl.train.sft import cross_entropy
from mopdctl.train.step import Accumulated, Algorithm, Policy, TokenLoss, accumulate, token_loss

EXACT = 1e-10

REDUCTIONS: list[Reduction] = ["token", "sequence"]

# (teacher, lambda, prompt length, loss mask): 32 loss tokens, each sequence with 1, 2, 4 or 8 of them, 8 sequences.
ROWS = [
    ("code", 2.0, 3, [1] * 8),
    ("code", 2.0, 1, [0, 1, 1, 0, 1, 1]),
    ("code", 2.0, 9, [1]),
    ("math", 1.0, 2, [1, 1, 1, 1]),
    ("math", 1.0, 6, [0, 0, 0, 1, 1]),
    ("math", 1.0, 1, [1] * 8),
    ("tool", 0.5, 4, [1, 0, 1, 0, 1, 0, 1]),
    ("tool", 0.5, 2, [0, 1]),
]


def sequences() -> list[TrainSequence]:
    found = []
    for i, (teacher, weight, prompt, mask) in enumerate(ROWS):
        prompt_ids = [(13 * i + 7 * j) % 100 for j in range(prompt)]
        response_ids = [(29 * i + 11 * j + 5) % 100 for j in range(len(mask))]
        streams = {
            "behavior_logprobs": [-0.25 * ((3 * i + 5 * j) % 31) for j in range(len(mask))],
            "teacher_logprobs": [-0.25 * ((7 * i + 3 * j) % 29) for j in range(len(mask))],
        }
        found.append(TrainSequence(f"s{i}", prompt_ids, response_ids, mask, teacher, weight, streams))
    return found


def long_row_without_loss() -> TrainSequence:
    """Sixty tokens of context that force padding on everything beside it."""
    streams = {"behavior_logprobs": [-1.0] * 40, "teacher_logprobs": [-1.0] * 40}
    return TrainSequence("long", list(range(20)), list(range(40)), [0] * 40, "code", 2.0, streams)


def weighted(policy: Policy, micro_batch: MicroBatch) -> TokenLoss:
    """A loss that depends on token, stream and model: (teacher - behaviour) * log p, in float64."""
    logprobs_N = token_logprobs(policy.logits_NV, micro_batch.tokens_N)
    gap_N = (micro_batch.streams["teacher_logprobs"] - micro_batch.streams["behavior_logprobs"]).double()
    return token_loss(
        -gap_N * logprobs_N, micro_batch, {"gap": gap_N}, {"teacher_logprobs": micro_batch.streams["teacher_logprobs"]}
    )


def policy_gradient(policy: Policy, micro_batch: MicroBatch) -> TokenLoss:
    """The sampled-token objective of MOPD with the sampler's probabilities as given."""
    logprobs_N = token_logprobs(policy.logits_NV, micro_batch.tokens_N)
    streams = micro_batch.streams
    advantage_N = distillation_advantage(streams["teacher_logprobs"], logprobs_N)
    weight_N, mask_N = correction_weight(staleness_ratio(logprobs_N, streams["behavior_logprobs"]), "icepop", 0.01, 5.0)
    surrogate_N, _ = clipped_surrogate(logprobs_N, logprobs_N, advantage_N, clip_low=0.2, clip_high=0.28)
    return token_loss(-weight_N * surrogate_N, micro_batch, {"kept": mask_N})


def gradient(model: HFModel) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.model.named_parameters() if p.grad is not None}


def run(
    model: HFModel,
    rows: Sequence[TrainSequence],
    algorithm: Algorithm = weighted,
    *,
    pieces: int = 1,
    reduction: Reduction = "token",
    per_teacher_norms: bool = False,
) -> tuple[Accumulated, dict[str, Tensor]]:
    model.model.zero_grad(set_to_none=True)
    micro_batches = cut(rows, reduction=reduction, num_micro_batches=pieces, pad_id=model.pad_id, device=model.device)
    result = accumulate(model, micro_batches, algorithm, per_teacher_norms=per_teacher_norms)
    found = gradient(model)
    model.model.zero_grad(set_to_none=True)
    return result, found


def reference_losses(model: HFModel, row: TrainSequence) -> Tensor:
    """(teacher - behaviour) * -log p at the loss tokens of one sequence, from the whole row and by explicit indices."""
    ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
    logits = model.model(input_ids=ids, use_cache=False).logits[0, :, : model.vocab_size]
    logprobs = torch.log_softmax(logits, dim=-1)
    terms = [
        -(row.streams["teacher_logprobs"][t] - row.streams["behavior_logprobs"][t])
        * logprobs[len(row.prompt_ids) + t - 1, token]
        for t, token in enumerate(row.response_ids)
        if row.loss_mask[t]
    ]
    return torch.stack(terms)


def reference(
    model: HFModel, rows: Sequence[TrainSequence], reduction: Reduction
) -> tuple[float, dict[str, dict[str, Tensor]]]:
    """The loss, and each teacher's gradient by parameter name."""
    total = sum(sum(r.loss_mask) for r in rows)
    loss = 0.0
    gradients: dict[str, dict[str, Tensor]] = {}
    for teacher in sorted({r.teacher_id for r in rows}):
        model.model.zero_grad(set_to_none=True)
        for row in rows:
            if row.teacher_id != teacher or not any(row.loss_mask):
                continue
            losses = reference_losses(model, row)
            share = losses.sum() / total if reduction == "token" else losses.mean() / len(rows)
            (row.weight * share).backward()
            loss += row.weight * share.item()
        gradients[teacher] = gradient(model)
    model.model.zero_grad(set_to_none=True)
    return loss, gradients


def added(gradients: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    parts = list(gradients.values())
    return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}


def norm(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(math.fsum(float((g.double() ** 2).sum()) for g in gradients.values()))


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = EXACT) -> None:
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=0.0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


# --------------------------------------------------------------------------------------------------- splits and padding


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("pieces", [1, 2, 4, 8])
def test_loss_and_gradient_equal_the_unpadded_reference_however_the_step_is_split(
    model64: HFModel, reduction: Reduction, pieces: int
) -> None:
    loss, gradients = reference(model64, sequences(), reduction)
    result, found = run(model64, sequences(), pieces=pieces, reduction=reduction)
    assert result.loss == pytest.approx(loss, abs=EXACT)
    assert abs(loss) > 0.1
    assert_same(found, added(gradients))


@pytest.mark.parametrize("pieces", [1, 4])
def test_a_long_row_without_loss_changes_nothing_under_token_reduction(model64: HFModel, pieces: int) -> None:
    plain, gradients = run(model64, sequences())
    padded, padded_gradients = run(model64, [*sequences(), long_row_without_loss()], pieces=pieces)
    assert padded.loss == pytest.approx(plain.loss, abs=EXACT)
    assert_same(padded_gradients, gradients)
    assert padded.tokens == plain.tokens


def test_a_row_without_loss_still_counts_as_a_sequence_under_sequence_reduction(model64: HFModel) -> None:
    plain, gradients = run(model64, sequences(), reduction="sequence")
    more, more_gradients = run(model64, [*sequences(), long_row_without_loss()], reduction="sequence")
    # 1/9 is no float32: the coefficients round at 6e-8
    assert more.loss == pytest.approx(plain.loss * 8 / 9, rel=1e-6)
    scaled = {name: g * 8 / 9 for name, g in gradients.items()}
    assert_same(more_gradients, scaled, tolerance=1e-6 * max(float(g.abs().max()) for g in gradients.values()))


def test_the_order_of_the_sequences_changes_nothing(model64: HFModel) -> None:
    plain, gradients = run(model64, sequences(), pieces=4)
    rows = sequences()
    shuffled, shuffled_gradients = run(model64, [rows[(3 * i + 1) % 8] for i in range(8)], pieces=4)
    assert shuffled.loss == pytest.approx(plain.loss, abs=EXACT)
    assert_same(shuffled_gradients, gradients)


def test_the_pad_token_does_not_matter(model64: HFModel) -> None:
    plain, gradients = run(model64, sequences())
    model64.pad_id = 42
    other, other_gradients = run(model64, sequences())
    assert other.loss == pytest.approx(plain.loss, abs=EXACT)
    assert_same(other_gradients, gradients)


def test_two_accumulations_into_the_same_gradients_add_up(model64: HFModel) -> None:
    _, once = run(model64, sequences())
    micro_batches = cut(
        sequences(), reduction="token", num_micro_batches=2, pad_id=model64.pad_id, device=model64.device
    )
    for _ in range(2):
        accumulate(model64, micro_batches, weighted)
    assert_same(gradient(model64), {name: 2 * g for name, g in once.items()})


@pytest.mark.parametrize("algorithm", [cross_entropy, policy_gradient])
def test_splits_and_padding_leave_every_algorithm_unchanged(model64: HFModel, algorithm: Algorithm) -> None:
    plain, gradients = run(model64, sequences(), algorithm)
    # cross_entropy stays float64; the objective of the policy gradient is float32, so its terms of up to about 30 may
    # round the other way after padding: 6e-8 * 30
    tolerance = EXACT if algorithm is cross_entropy else 2e-6 * max(float(g.abs().max()) for g in gradients.values())
    for pieces in (3, 8):
        other, found = run(model64, [*sequences(), long_row_without_loss()], algorithm, pieces=pieces)
        assert other.loss == pytest.approx(plain.loss, rel=1e-6)
        assert_same(found, gradients, tolerance=tolerance)
        assert other.means == {name: pytest.approx(by_teacher, rel=1e-6) for name, by_teacher in plain.means.items()}


def test_tied_embeddings_receive_both_of_their_gradients(make_model64: Callable[..., Any]) -> None:
    model = make_model64(tie_word_embeddings=True)
    loss, gradients = reference(model, sequences(), "token")
    result, found = run(model, sequences(), pieces=4, per_teacher_norms=True)
    assert result.loss == pytest.approx(loss, abs=EXACT)
    assert_same(found, added(gradients))


# ---------------------------------------------------------------------------------------------------------- by teacher


def test_measuring_each_teacher_leaves_the_very_same_gradient_with_one_micro_batch_each(model64: HFModel) -> None:
    plain, gradients = run(model64, sequences())
    measured, same = run(model64, sequences(), per_teacher_norms=True)
    assert measured.loss == plain.loss
    assert gradients.keys() == same.keys()
    assert all(torch.equal(gradients[name], same[name]) for name in gradients)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("pieces", [1, 8])
def test_gradient_norms_are_those_of_each_teacher_alone(model64: HFModel, reduction: Reduction, pieces: int) -> None:
    _, gradients = reference(model64, sequences(), reduction)
    result, found = run(model64, sequences(), pieces=pieces, reduction=reduction, per_teacher_norms=True)
    assert result.grad_norms == pytest.approx({t: norm(g) for t, g in gradients.items()}, rel=1e-10)
    assert_same(found, added(gradients))


def test_gradient_norms_are_not_measured_unless_asked_for(model64: HFModel) -> None:
    assert run(model64, sequences())[0].grad_norms == {}


def test_old_gradients_do_not_leak_into_the_measurement(model64: HFModel) -> None:
    clean, _ = run(model64, sequences(), per_teacher_norms=True)
    for parameter in model64.model.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    micro_batches = cut(
        sequences(), reduction="token", num_micro_batches=1, pad_id=model64.pad_id, device=model64.device
    )
    again = accumulate(model64, micro_batches, weighted, per_teacher_norms=True)
    assert again.grad_norms == clean.grad_norms


@pytest.mark.parametrize("pieces", [1, 8])
def test_tokens_and_means_are_counted_by_teacher(model64: HFModel, pieces: int) -> None:
    result, _ = run(model64, sequences(), pieces=pieces)
    assert result.tokens == {"code": 13, "math": 14, "tool": 5}
    by_hand = {}
    for teacher in result.tokens:
        gaps = [
            t - b
            for row in sequences()
            if row.teacher_id == teacher
            for t, b, m in zip(
                row.streams["teacher_logprobs"], row.streams["behavior_logprobs"], row.loss_mask, strict=True
            )
            if m
        ]
        by_hand[teacher] = sum(gaps) / len(gaps)
    assert result.means["gap"] == pytest.approx(by_hand, abs=1e-12)


def test_streams_come_back_by_sample_without_their_masked_tokens(model64: HFModel) -> None:
    result, _ = run(model64, sequences(), pieces=4)
    by_hand = {
        row.sample_id: [x for x, m in zip(row.streams["teacher_logprobs"], row.loss_mask, strict=True) if m]
        for row in sequences()
    }
    assert result.streams["teacher_logprobs"] == by_hand  # quarters are exact


@pytest.mark.parametrize("per_teacher_norms", [False, True])
def test_a_teacher_without_loss_tokens_leaves_no_trace(model64: HFModel, per_teacher_norms: bool) -> None:
    streams = {"behavior_logprobs": [-1.0] * 3, "teacher_logprobs": [-2.0] * 3}
    silent = TrainSequence("z", [1, 2], [3, 4, 5], [0, 0, 0], "silent", 5.0, streams)
    plain, gradients = run(model64, sequences(), per_teacher_norms=per_teacher_norms)
    more, more_gradients = run(model64, [silent, *sequences()], per_teacher_norms=per_teacher_norms)
    assert (more.loss, more.tokens, more.means, more.grad_norms) == (
        plain.loss,
        plain.tokens,
        plain.means,
        plain.grad_norms,
    )
    assert_same(more_gradients, gradients)


@pytest.mark.parametrize("per_teacher_norms", [False, True])
def test_nothing_to_train_on_is_a_loss_of_zero_without_gradients(model64: HFModel, per_teacher_norms: bool) -> None:
    for rows in ([], [long_row_without_loss()]):
        result, found = run(model64, rows, per_teacher_norms=per_teacher_norms)
        assert (result.loss, result.tokens, result.means, result.grad_norms, found) == (0.0, {}, {}, {}, {})


def test_a_figure_that_one_teacher_lacks_is_missing_and_not_zero(model64: HFModel) -> None:
    def only_code(policy: Policy, micro_batch: MicroBatch) -> TokenLoss:
        three_N = torch.full_like(micro_batch.coefficients_N, 3.0)
        extra = {"extra": three_N} if micro_batch.teacher_id == "code" else {}
        return TokenLoss(weighted(policy, micro_batch).loss, extra)

    result, _ = run(model64, sequences(), only_code)
    assert result.means == {"extra": {"code": 3.0}}


# ------------------------------------------------------------------------------------------------------------- masking


def test_poisoned_values_at_masked_positions_never_reach_loss_or_gradient(model64: HFModel) -> None:
    plain, gradients = run(model64, sequences())
    rows = [
        TrainSequence(
            r.sample_id,
            r.prompt_ids,
            r.response_ids,
            r.loss_mask,
            r.teacher_id,
            r.weight,
            {n: [x if m else math.nan for x, m in zip(s, r.loss_mask, strict=True)] for n, s in r.streams.items()},
        )
        for r in sequences()
    ]
    poisoned, poisoned_gradients = run(model64, rows)
    assert poisoned.loss == plain.loss
    assert all(torch.equal(poisoned_gradients[n], gradients[n]) for n in gradients)


def test_gradients_are_finite_and_untouched_parameters_have_none_when_frozen(model64: HFModel) -> None:
    model64.model.get_input_embeddings().weight.requires_grad_(False)
    _, found = run(model64, sequences(), per_teacher_norms=True)
    assert "model.embed_tokens.weight" not in found
    assert all(bool(torch.isfinite(g).all()) for g in found.values())
    assert norm(found) > 0.1


def test_cross_entropy_is_the_negative_log_likelihood_in_nats(model64: HFModel) -> None:
    result, _ = run(model64, sequences(), cross_entropy)
    total, weighted_total = 0.0, 0.0
    for row in sequences():
        score = model64.score([(row.prompt_ids, row.response_ids)])[0]
        nats = -sum(x for x, m in zip(score, row.loss_mask, strict=True) if m)
        total, weighted_total = total + nats, weighted_total + row.weight * nats
    assert result.loss == pytest.approx(weighted_total / 32, rel=1e-6)
    assert sum(result.means["sft/loss_nats"][t] * n for t, n in result.tokens.items()) == pytest.approx(total, rel=1e-6)
