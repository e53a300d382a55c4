import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.fp4 import e2m1

TIES = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}
"""Magnitudes half way between two values, and the code that half to even gives them."""

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def reference(values: Tensor) -> Tensor:
    """The nearest value by distances in float64; of two at the same distance that of the even code."""
    distances = (
        values.double().abs().clamp(max=9).unsqueeze(-1) - torch.tensor(e2m1.VALUES, dtype=torch.float64)
    ).abs()
    nearest = distances == distances.amin(-1, keepdim=True)
    code = torch.arange(8).expand_as(distances)
    return torch.where(nearest, code + 8 * (code % 2), 99).amin(-1) % 8 + 8 * (values < 0)


def float32(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_decodes_to_its_value_and_back(dtype: torch.dtype) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = e2m1.decode(codes, dtype)
    assert values.dtype == dtype
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert e2m1.encode(values).tolist() == [*range(8), 0, *range(9, 16)]


# Model-Optimizer MXFP4QTensor: every tie rounded down, and +0.0 got code 8
def test_ties_go_to_the_even_code_and_their_neighbours_to_the_nearer_value() -> None:
    for tie, even in TIES.items():
        at = float32(tie)
        below, above = torch.nextafter(at, float32(0)), torch.nextafter(at, float32(9))
        assert e2m1.encode(at).item() == even
        assert e2m1.encode(-at).item() == even + 8
        lower = [code for code, value in enumerate(e2m1.VALUES) if value < tie][-1]
        assert e2m1.encode(torch.cat([below, above, -below, -above])).tolist() == [
            lower,
            lower + 1,
            lower + 8,
            lower + 9,
        ]


def test_zeros_of_both_signs_get_code_0_and_what_rounds_to_zero_keeps_its_sign() -> None:
    assert e2m1.encode(float32(0.0, -0.0, 1e-45, -1e-45, 0.1, -0.1)).tolist() == [0, 0, 0, 8, 0, 8]


def test_magnitudes_above_6_saturate() -> None:
    largest = torch.finfo(torch.float32).max
    assert e2m1.encode(float32(6.1, -7.0, 8.0, 1e9, -largest, float("inf"))).tolist() == [7, 15, 7, 7, 15, 7]


@settings(max_examples=100, deadline=None)
@given(st.floats(width=32, allow_nan=False) | st.floats(-8, 8, width=32))
def test_codes_are_those_of_the_nearest_values(number: float) -> None:
    values = float32(number)
    assert e2m1.encode(values).tolist() == reference(values).tolist()


def test_codes_are_those_of_the_nearest_values_on_a_fine_grid() -> None:
    values = torch.arange(-8 * 2**12, 8 * 2**12 + 1) * 2.0**-12  # every tie among them
    assert torch.equal(e2m1.encode(values).long(), reference(values))
    assert torch.equal(e2m1.encode(values.bfloat16()).long(), reference(values.bfloat16()))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31))
def test_rounding_without_codes_is_encoding_and_decoding(seed: int) -> None:
    values = 4 * torch.randn(3, 64, generator=torch.Generator().manual_seed(seed))
    before = values.clone()
    assert torch.equal(e2m1.round_to_values(values), e2m1.decode(e2m1.encode(values)))
    assert torch.equal(values, before)
    assert torch.equal(e2m1.round_to_values_(values), e2m1.decode(e2m1.encode(before)))


def test_what_is_encoded_is_left_as_it_was() -> None:
    values = float32(-0.0, 0.3, -9.0)
    e2m1.encode(values)
    assert str(values.tolist()) == "[-0.0, 0.30000001192092896, -9.0]"


def test_the_even_column_lies_in_the_low_half_of_a_byte() -> None:
    codes = torch.tensor([[1, 2, 15, 0], [8, 7, 3, 12]], dtype=torch.uint8)
    assert e2m1.pack(codes).tolist() == [[0x21, 0x0F], [0x78, 0xC3]]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 9))
def test_packing_round_trips_in_any_shape_and_memory_order(seed: int, rows: int, pairs: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (2, rows, 2 * pairs), dtype=torch.uint8, generator=generator)
    for each in (codes, codes.transpose(0, 1)):
        packed = e2m1.pack(each)
        assert packed.shape == (*each.shape[:-1], pairs)
        assert torch.equal(e2m1.unpack(packed), each)
        assert torch.equal(e2m1.decode_packed(packed), e2m1.decode(each))


def test_all_bytes_unpack_to_their_halves() -> None:
    packed = torch.arange(256, dtype=torch.uint8)
    assert e2m1.unpack(packed).view(256, 2).tolist() == [[byte % 16, byte // 16] for byte in range(256)]
    assert torch.equal(e2m1.pack(e2m1.unpack(packed)), packed)


def test_an_odd_number_of_codes_is_refused() -> None:
    with pytest.raises(InputError, match=r"\[2, 3\].*must be even"):
        e2m1.pack(torch.zeros(2, 3, dtype=torch.uint8))


def test_codes_are_packed_whatever_their_strides() -> None:
    codes = torch.arange(32, dtype=torch.uint8).remainder(16).view(32, 1)
    assert e2m1.pack(codes.T).equal(e2m1.pack(codes.flatten().view(1, 32)))
    square = torch.randint(0, 16, (16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert e2m1.pack(square.T).equal(e2m1.pack(square.T.clone()))
