import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.fp4 import e2m1
from mopdctl.fp4.fp8 import dequantize_fp8
from mopdctl.fp4.moves import Losses, fp4_to_fp8, mxfp4_to_nvfp4, top_exponent
from mopdctl.fp4.nvfp4 import divisor as nvfp4_divisor
from mopdctl.fp4.nvfp4 import quantize as nvfp4_quantize
from mopdctl.fp4.quantized import Quantized, dequantize

ALL_CODES = torch.arange(32, dtype=torch.uint8) % 16
"""One block of MXFP4 with every code; both its halves hold them all."""


def mxfp4(codes_RK: Tensor, exponents: Tensor) -> Quantized:
    """Exponents [R, K/32], from -127."""
    return Quantized("mxfp4", e2m1.pack(codes_RK), (exponents + 127).to(torch.uint8), None)


def every_code(exponents: list[int]) -> Quantized:
    """One row, a block with every code for each of some exponents."""
    return mxfp4(ALL_CODES.repeat(len(exponents)).unsqueeze(0), torch.tensor([exponents]))


def bits(values: Tensor) -> list[int]:
    return values.flatten().view(torch.int32).tolist()


def moved(quantized: Quantized) -> tuple[Quantized, Losses]:
    return mxfp4_to_nvfp4(quantized, top_exponent(quantized))


# -------------------------------------------------------------------------------------------------- MXFP4 to NVFP4


@pytest.mark.parametrize("top", [-127, -126, -119, -118, -117, -100, -8, 0, 3, 100, 125, 126, 127])
def test_every_code_and_gap_up_to_17_moves_to_the_bit(top: int) -> None:
    source = every_code([max(top - gap, -127) for gap in range(18)])
    found, losses = moved(source)
    assert (found.format, losses.rounded_blocks, losses.changed_elements) == ("nvfp4", 0, 0)
    assert torch.equal(found.packed, source.packed)
    assert bits(dequantize(found)) == bits(dequantize(source))


def test_the_divisor_puts_the_largest_block_at_256() -> None:
    found, _ = moved(every_code([3, -2]))
    assert found.divisor == 2.0**5
    assert found.scales.view(torch.float8_e4m3fn).tolist() == [[256.0, 256.0, 8.0, 8.0]]


def test_a_divisor_has_a_normal_reciprocal_however_small_the_weights() -> None:
    assert moved(every_code([-127]))[0].divisor == 2.0**126
    assert moved(every_code([127]))[0].divisor == 2.0**-119


@pytest.mark.parametrize("gap", range(18, 30))
def test_from_a_gap_of_18_on_blocks_are_rounded_to_the_nearest_and_counted(gap: int) -> None:
    source = every_code([4, 4 - gap])
    found, losses = moved(source)
    assert losses.blocks == 4
    assert losses.rounded_blocks == 2
    # What one code is worth there is 2^(4 - 17); every code stands for 2^(17 - gap) of them.
    steps = e2m1.decode(ALL_CODES).double() * 2.0 ** (17 - gap)
    values = torch.tensor(e2m1.VALUES, dtype=torch.float64)
    distance = (steps.abs().unsqueeze(-1) - values).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    even = nearest & (torch.arange(8) % 2 == 0)
    expected = torch.where(nearest.sum(-1) > 1, even.int().argmax(-1), nearest.int().argmax(-1))
    codes = e2m1.unpack(found.packed)[0, 32:]
    assert (codes & 7).tolist() == expected.tolist()
    assert dequantize(found)[0, :32].tolist() == dequantize(source)[0, :32].tolist()
    changed = int((dequantize(found) != dequantize(source)).sum())
    assert losses.changed_elements == changed > 0
    assert losses.elements == 64


def test_rounded_blocks_without_half_steps_keep_their_values() -> None:
    source = mxfp4(torch.tensor([[7] * 32 + [2, 4, 5, 6, 7] * 6 + [0, 2]], dtype=torch.uint8), torch.tensor([[0, -18]]))
    found, losses = moved(source)
    assert (losses.rounded_blocks, losses.changed_elements) == (2, 0)
    assert torch.equal(dequantize(found), dequantize(source))
    assert not torch.equal(found.packed, source.packed)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), spread=st.integers(1, 40), zeros=st.floats(0, 1))
def test_exceptions_are_exactly_those_that_exponents_predict(seed: int, spread: int, zeros: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(0, spread, (3, 4), generator=generator) - 20
    codes = torch.randint(0, 16, (3, 4, 2, 16), generator=generator, dtype=torch.uint8)
    codes[torch.rand(3, 4, 2, generator=generator) < zeros] = 8  # -0.0
    source = mxfp4(codes.view(3, -1), exponents)
    found, losses = moved(source)
    present = (codes & 7).amax(-1) > 0
    top = top_exponent(source)
    held = exponents[present.any(-1)]
    assert top == (int(held.max()) if held.numel() else None)
    low = present & (exponents.unsqueeze(-1) < (top or 0) - 17)
    assert (losses.blocks, losses.rounded_blocks) == (int(present.sum()), int(low.sum()))
    before, after = dequantize(source).view(3, 4, 2, 16), dequantize(found).view(3, 4, 2, 16)
    assert losses.changed_elements == int((before != after).sum())
    assert bits(before[~low]) == bits(after[~low])


def test_blocks_of_zeros_fit_anywhere_and_set_no_exponent() -> None:
    codes = torch.zeros(1, 96, dtype=torch.uint8)
    codes[0, 40], codes[0, 64:] = 1, 7
    source = mxfp4(codes, torch.tensor([[90, -40, -30]]))  # zeros at 2^90; a half without a value at 2^-40
    found, losses = moved(source)
    assert top_exponent(source) == -30
    assert (losses.blocks, losses.rounded_blocks) == (3, 0)
    assert bits(dequantize(found)) == bits(dequantize(source))
    assert found.scales.view(torch.float8_e4m3fn).tolist() == [[2**-9, 2**-9, 2**-2, 2**-9, 256, 256]]


def test_a_matrix_of_zeros_has_the_divisor_1() -> None:
    source = mxfp4(torch.zeros(2, 32, dtype=torch.uint8), torch.tensor([[5], [-9]]))
    found, losses = moved(source)
    assert (found.divisor, found.scales.tolist()) == (1.0, [[1, 1], [1, 1]])
    assert losses == Losses(0, 0, 64, 0)
    assert dequantize(found).count_nonzero() == 0


def test_fused_siblings_share_the_divisor_of_the_largest() -> None:
    # vllm #55073: an engine keeps one scale for the two halves of w13
    gate, up = every_code([0, -10]), every_code([7, -9])
    tops = [top_exponent(gate), top_exponent(up)]
    assert tops == [0, 7]
    (one, kept), (other, _) = (mxfp4_to_nvfp4(side, 7) for side in (gate, up))
    assert one.divisor == other.divisor == 2.0
    assert bits(dequantize(one)) == bits(dequantize(gate))
    assert bits(dequantize(other)) == bits(dequantize(up))
    assert kept.rounded_blocks == 0
    with pytest.raises(InputError, match="top exponent 0: below 7"):
        mxfp4_to_nvfp4(up, 0)
    with pytest.raises(InputError, match="top exponent None: below 7"):
        mxfp4_to_nvfp4(up, None)


def test_nan_scales_and_other_formats_are_refused() -> None:
    # vllm-omni #4025: one NaN scale makes every output noise
    source = every_code([0, 1])
    source.scales[0, 1] = 255
    with pytest.raises(InputError, match=r"byte 255 \(NaN\) in 1 blocks"):
        top_exponent(source)
    found, _ = moved(every_code([0]))
    with pytest.raises(InputError, match="format nvfp4: only MXFP4 moves to NVFP4"):
        mxfp4_to_nvfp4(found, 0)


def test_a_large_matrix_moves_in_pieces_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (50, 64), generator=generator, dtype=torch.uint8)
    source = mxfp4(codes, torch.randint(-15, 5, (50, 2), generator=generator))
    whole = moved(source)
    monkeypatch.setattr("mopdctl.fp4.moves.row_chunks", lambda matrix: (slice(i, i + 7) for i in range(0, 50, 7)))
    pieces = moved(source)
    assert pieces[1] == whole[1]
    assert whole[1].rounded_blocks > 0
    assert torch.equal(pieces[0].packed, whole[0].packed)
    assert torch.equal(pieces[0].scales, whole[0].scales)


# ----------------------------------------------------------------------------------------------------- FP4 to FP8

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
REPRESENTABLE = E4M3[E4M3.isfinite()]


def exact_in_e4m3(values: Tensor, scale: float) -> Tensor:
    return torch.isin(values.double() / scale, REPRESENTABLE)


@pytest.mark.parametrize("top", [-100, -3, 0, 60, 124])
def test_exponents_up_to_14_apart_move_to_fp8_to_the_bit(top: int) -> None:
    source = every_code([top, top - 14, top - 7, top - 1])  # 128 columns: one block
    codes, scales, losses = fp4_to_fp8(source)
    assert scales.tolist() == [[2.0 ** (top - 6)]]
    assert losses == Losses(blocks=1, rounded_blocks=0, elements=128, changed_elements=0)
    assert bits(dequantize_fp8(codes, scales)) == bits(dequantize(source))


def test_at_15_exactly_the_odd_halves_are_lost() -> None:
    source = every_code([0, -15])
    codes, scales, losses = fp4_to_fp8(source)
    # +-0.5 * 2^-15 and +-1.5 * 2^-15 lie between values that are 2^-15 apart; each stands twice in a block.
    assert losses == Losses(blocks=1, rounded_blocks=1, elements=64, changed_elements=8)
    changed = dequantize_fp8(codes, scales) != dequantize(source)
    assert sorted(set(e2m1.decode(ALL_CODES)[changed[0, 32:]].tolist())) == [-1.5, -0.5, 0.5, 1.5]


def test_a_block_without_large_codes_has_more_room() -> None:
    small = ALL_CODES.clone()
    small[(small & 7) > 5] = 5  # at most 3
    codes_RK = torch.cat([small, ALL_CODES]).unsqueeze(0)
    _, scales, losses = fp4_to_fp8(mxfp4(codes_RK, torch.tensor([[0, -15]])))
    assert (scales.item(), losses.changed_elements) == (2.0**-7, 0)


def test_blocks_are_128_by_128_and_those_at_the_edges_stand_alone() -> None:
    exponents = torch.zeros(130, 5)
    exponents[128:, :4] = 40  # below the first block
    exponents[:128, 4] = -40  # to its right
    source = mxfp4(ALL_CODES.repeat(130, 5), exponents.int())
    codes, scales, losses = fp4_to_fp8(source)
    assert scales.tolist() == [[2.0**-6, 2.0**-46], [2.0**34, 2.0**-6]]
    assert losses == Losses(blocks=4, rounded_blocks=0, elements=130 * 160, changed_elements=0)
    assert bits(dequantize_fp8(codes, scales)) == bits(dequantize(source))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), spread=st.integers(1, 30))
def test_fp8_exceptions_are_exactly_what_e4m3_cannot_hold(seed: int, spread: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes_RK = torch.randint(0, 16, (5, 160), generator=generator, dtype=torch.uint8)
    source = mxfp4(codes_RK, torch.randint(0, spread, (5, 5), generator=generator) - 12)
    codes, scales, losses = fp4_to_fp8(source)
    before, after = dequantize(source), dequantize_fp8(codes, scales)
    changed = 0
    for block, scale in ((slice(0, 128), scales[0, 0].item()), (slice(128, 160), scales[0, 1].item())):
        held = exact_in_e4m3(before[:, block], scale)
        assert torch.equal(held, before[:, block] == after[:, block])
        changed += int((~held).sum())
        nearest = (before[:, block].double().unsqueeze(-1) / scale - REPRESENTABLE).abs().amin(-1)
        assert torch.equal((before[:, block].double() - after[:, block].double()).abs() / scale, nearest)
    assert losses.changed_elements == changed


def test_what_moved_to_nvfp4_moves_on_to_the_same_fp8() -> None:
    source = every_code([0, -3, -14, -9])
    direct, over = fp4_to_fp8(source), fp4_to_fp8(moved(source)[0])
    assert torch.equal(direct[0].view(torch.uint8), over[0].view(torch.uint8))
    assert torch.equal(direct[1], over[1])
    assert direct[2] == over[2]


def test_nvfp4_in_general_does_not_fit_and_says_so() -> None:
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    source = nvfp4_quantize(weight, nvfp4_divisor(float(weight.abs().max()), "max"), method="max")
    codes, scales, losses = fp4_to_fp8(source)
    before, after = dequantize(source), dequantize_fp8(codes, scales)
    assert losses == Losses(2, 2, weight.numel(), int((before != after).sum()))
    assert losses.changed_elements > weight.numel() / 2
    assert float(((after - before).abs() / before.abs().clamp(min=scales.max().item() * 2**-6)).max()) <= 2**-4


def test_fp8_of_zeros_and_of_what_is_no_number() -> None:
    zeros = mxfp4(torch.full((4, 32), 8, dtype=torch.uint8), torch.full((4, 1), 3))
    codes, scales, losses = fp4_to_fp8(zeros)
    assert (scales.tolist(), losses) == ([[1.0]], Losses(0, 0, 128, 0))
    assert bits(dequantize_fp8(codes, scales)) == bits(dequantize(zeros))
    broken = every_code([0])
    broken.scales[0, 0] = 255
    with pytest.raises(InputError, match="NaN or infinite"):
        fp4_to_fp8(broken)


def test_losses_add_up() -> None:
    assert Losses(1, 2, 3, 4) + Losses(10, 20, 30, 40) == Losses(11, 22, 33, 44)
