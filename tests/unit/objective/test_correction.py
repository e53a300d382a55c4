import math

import pytest
import torch

from mopdctl.objective.correction import correction_weight, icepop_mask, staleness_ratio


def test_ratio_is_proximal_over_behaviour_probability() -> None:
    c = staleness_ratio(torch.tensor([0.5, 0.1, 0.3]).log(), torch.tensor([0.25, 0.4, 0.3]).log())
    # exp and log of float32 round in the last place
    torch.testing.assert_close(c, torch.tensor([2.0, 0.25, 1.0]), rtol=1e-6, atol=0.0)


def test_equal_scores_give_a_ratio_of_exactly_one() -> None:
    scores = torch.tensor([-0.1, -17.3, -80.0])
    assert staleness_ratio(scores, scores.clone()).tolist() == [1.0, 1.0, 1.0]


def test_both_ends_belong_to_the_icepop_band() -> None:
    below, above = math.nextafter(0.5, 0.0), math.nextafter(5.0, 6.0)
    c = torch.tensor([below, 0.5, 1.0, 5.0, above], dtype=torch.float64)
    assert icepop_mask(c, 0.5, 5.0).tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]


def test_icepop_weight_is_the_ratio_itself_inside_the_band_and_zero_outside() -> None:
    c = torch.tensor([0.1, 0.5, 0.8, 3.0, 5.0, 7.0, math.inf])
    weight, mask = correction_weight(c, "icepop", 0.5, 5.0)
    assert weight.tolist() == [0.0, *c[1:5].tolist(), 0.0, 0.0]
    assert mask.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


def test_icepop_with_an_infinite_band_is_plain_importance_weighting() -> None:
    c = torch.tensor([0.0, 1e-6, 0.3, 1.0, 42.0, 1e6])
    weight, mask = correction_weight(c, "icepop", 0.0, math.inf)
    assert torch.equal(weight, c)
    assert mask.tolist() == [1.0] * 6


def test_tis_clamps_the_ratio_and_drops_nothing() -> None:
    weight, mask = correction_weight(torch.tensor([0.1, 0.2, 1.0, 5.0, 9.0]), "tis", 0.2, 5.0)
    torch.testing.assert_close(weight, torch.tensor([0.2, 0.2, 1.0, 5.0, 5.0]), rtol=0.0, atol=0.0)
    assert mask.tolist() == [1.0] * 5


def test_no_correction_weighs_every_token_by_one() -> None:
    weight, mask = correction_weight(torch.tensor([0.0, 0.1, 9.0, math.inf]), "none", 0.5, 5.0)
    assert weight.tolist() == [1.0] * 4
    assert mask.tolist() == [1.0] * 4


@pytest.mark.parametrize("kind", ["icepop", "tis"])
def test_weights_stay_bounded_under_drift_over_a_long_answer(kind: str) -> None:
    drift = torch.linspace(-3.0, 3.0, 4096)  # nats between learner and sampler, far outside the band at both ends
    weight, _ = correction_weight(staleness_ratio(drift, torch.zeros(4096)), kind, 0.5, 5.0)  # type: ignore[arg-type]
    assert weight.max() <= 5.0
    assert weight.min() >= 0.0
