import math

import pytest
import torch

from mopdctl.engines.layout import lay_out, token_logprobs

CPU = torch.device("cpu")


def test_prompts_end_and_responses_begin_in_one_column() -> None:
    layout = lay_out([[1, 2, 3], [4]], [[5], [6, 7]], pad_id=0, device=CPU)
    assert layout.input_ids_BT.tolist() == [[1, 2, 3, 5, 0], [0, 0, 4, 6, 7]]
    assert layout.attention_mask_BT.tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert layout.response_BR.tolist() == [[5, 0], [6, 7]]
    assert layout.present_BR.tolist() == [[True, False], [True, True]]


def test_positions_of_real_tokens_count_from_zero_in_every_row() -> None:
    layout = lay_out([[1, 2, 3], [4]], [[5], [6, 7]], pad_id=0, device=CPU)
    rows = [
        [p for p, m in zip(positions, mask, strict=True) if m]
        for positions, mask in zip(layout.position_ids_BT.tolist(), layout.attention_mask_BT.tolist(), strict=True)
    ]
    assert rows == [[0, 1, 2, 3], [0, 1, 2]]


def test_a_real_token_equal_to_the_pad_token_is_not_padding() -> None:
    layout = lay_out([[0, 9]], [[0, 0]], pad_id=0, device=CPU)
    assert layout.attention_mask_BT.tolist() == [[1, 1, 1, 1]]
    assert layout.present_BR.tolist() == [[True, True]]


def test_responses_may_be_empty() -> None:
    layout = lay_out([[1, 2], [3]], [[], []], pad_id=0, device=CPU)
    assert layout.input_ids_BT.tolist() == [[1, 2], [0, 3]]
    assert layout.response_BR.shape == (2, 0)


def test_an_empty_prompt_is_refused() -> None:
    # Its first response token would be predicted from padding.
    with pytest.raises(ValueError, match="prompt"):
        lay_out([[1], []], [[2], [3]], pad_id=0, device=CPU)


def test_token_logprobs_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [math.log(4.0), 0.0]], dtype=torch.float64)
    got = token_logprobs(logits, torch.tensor([1, 1]))
    assert got.tolist() == pytest.approx([math.log(0.75), math.log(0.2)], rel=1e-15)


def test_token_logprobs_compute_half_precision_in_float32_and_keep_float64() -> None:
    logits = torch.linspace(-4, 4, 50, dtype=torch.float64).unsqueeze(0)
    token = torch.tensor([20])
    half = token_logprobs(logits.bfloat16(), token)
    by_hand = torch.log_softmax(logits.bfloat16().double(), -1)[0, 20]
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(float(by_hand), rel=1e-6)
    assert token_logprobs(logits, token).dtype == torch.float64


def test_token_logprobs_do_not_overflow() -> None:
    got = token_logprobs(torch.tensor([[1e4, 0.0], [-1e4, -1e4]]), torch.tensor([0, 1]))
    assert got.tolist() == pytest.approx([0.0, -math.log(2)], abs=1e-3)  # float32 at 1e4 resolves about 1e-3
