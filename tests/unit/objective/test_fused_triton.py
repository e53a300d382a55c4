"""The Triton kernels against the definition: on a GPU, or anywhere with `TRITON_INTERPRET=1` where Triton is installed.

`pytest -m gpu tests/unit/objective/test_fused_triton.py`
"""

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from mopdctl.objective import chunked, chunks
from mopdctl.objective.chunked import chunked_divergence
from mopdctl.objective.head import Head, bend_
from mopdctl.objective.reverse_kl import reverse_kl

triton = pytest.importorskip("triton")
fused_triton: Any = pytest.importorskip("mopdctl.objective.fused_triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="no CUDA device, kernels not interpreted"
    ),
]
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
SINGLE = {"rtol": 1e-4, "atol": 2e-5}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def by_definition(policy_logprobs: Tensor, target_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    return reverse_kl(policy_logprobs, target_logprobs)


def expected(s: Any, t: Any, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Value, two log-probabilities, entropy, and the gradient with respect to the bare product without the scale."""
    policy, target = (bend_(raw.product_CV.double(), raw.head, raw.bias_V) for raw in (s, t))
    p, q = torch.log_softmax(policy, -1), torch.log_softmax(target, -1)
    value, gradient = reverse_kl(p, q)
    if s.head.softcap is not None:
        gradient = gradient * (1 - (policy / s.head.softcap) ** 2)
    at = tokens.unsqueeze(-1)
    entropy = -torch.nan_to_num(p.exp() * p, nan=0.0).sum(-1)
    return value, p.gather(1, at).squeeze(1), q.gather(1, at).squeeze(1), entropy, gradient


def run(s: Any, t: Any, tokens: Tensor, kept: Tensor, dtype: torch.dtype) -> tuple[Any, Tensor]:
    found = fused_triton.measure(s, t, tokens)
    out = torch.full(s.product_CV.shape, 7.0, dtype=dtype, device=DEVICE)
    fused_triton.differentiate(s, t, found, kept, out)
    return found, out


@pytest.mark.parametrize("vocab_size", [5, 4096, 9001])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, 6.0), (1.0, 30.0)])
def test_kernels_are_the_definition(vocab_size: int, bias: bool, scale: float, softcap: float | None) -> None:
    rows = 3
    weight = torch.empty(vocab_size, 1, device=DEVICE)
    s, t = (
        fused_triton.Raw(
            3 * normal(rows, vocab_size, seed=seed),
            normal(vocab_size, seed=seed + 9) if bias else None,
            Head(weight, None, scale * (1 + seed), softcap),
        )
        for seed in range(2)
    )
    tokens = torch.tensor([0, vocab_size - 1, vocab_size // 2], device=DEVICE)
    kept = torch.tensor([True, False, True], device=DEVICE)
    found, gradient = run(s, t, tokens, kept, torch.float32)
    value, policy, teacher, entropy, naive = expected(s, t, tokens)
    for mine, other in (
        (found.value_C, value),
        (found.policy_logprobs_C, policy),
        (found.target_logprobs_C, teacher),
        (found.entropy_C, entropy),
        (gradient[kept], naive[kept]),
    ):
        torch.testing.assert_close(mine.double(), other, **SINGLE)
    assert not gradient[1].any()


def test_equal_products_give_exactly_zero() -> None:
    raw = fused_triton.Raw(5 * normal(2, 9001), None, Head(torch.empty(9001, 1, device=DEVICE)))
    both = torch.ones(2, dtype=torch.bool, device=DEVICE)
    found, gradient = run(raw, raw, torch.zeros(2, dtype=torch.long, device=DEVICE), both, torch.bfloat16)
    assert not found.value_C.any()
    assert not gradient.any()


def test_zero_probabilities_poison_and_dropped_rows() -> None:
    products = [normal(6, 5000, seed=seed) for seed in range(2)]
    s, t = products
    s[0, :4500] = s[1, 3] = t[1, 3] = t[2, 4] = -math.inf
    t[3] = math.nan
    s[4], t[4] = math.nan, 1e9
    head = Head(torch.empty(5000, 1, device=DEVICE))
    raws = [fused_triton.Raw(product, None, head) for product in products]
    kept = torch.tensor([True, True, False, False, False, True], device=DEVICE)
    tokens = torch.full((6,), 4999, device=DEVICE)
    found, gradient = run(*raws, tokens, kept, torch.float32)
    value, _, _, _, naive = expected(*raws, tokens)
    torch.testing.assert_close(found.value_C[kept].double(), value[kept], **SINGLE)
    torch.testing.assert_close(gradient[kept].double(), naive[kept], **SINGLE)
    assert torch.isposinf(found.value_C[2])
    assert not torch.isfinite(found.value_C[3:5]).any()
    assert not gradient[~kept].any()


def heads(vocab_size: int, dtype: torch.dtype) -> dict[str, Any]:
    num_tokens, width, teacher_width = 37, 64, 96
    return {
        "hidden_NH": normal(num_tokens, width).to(dtype).requires_grad_(),
        "head": Head((normal(vocab_size + 8, width, seed=1) / 4).to(dtype).requires_grad_(), scale=0.5, softcap=20.0),
        "target_hidden_NG": normal(num_tokens, teacher_width, seed=2).to(dtype),
        "target_head": Head((normal(vocab_size, teacher_width, seed=3) / 5).to(dtype)),
        "tokens_N": torch.arange(num_tokens, device=DEVICE),
    }


@pytest.mark.parametrize("chunk", [3, 8, 100])
def test_gradients_of_a_few_chunks_go_into_the_products_together(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = heads(300, torch.float32)
    weight = torch.rand(37, device=DEVICE)
    weight[4] = 0.0
    receivers = [given["hidden_NH"], given["head"].weight_VH]
    seen: list[int] = []

    def weights(policy_logprobs: Tensor, rows: slice) -> Tensor:
        seen.append(len(policy_logprobs))
        return weight[rows]

    naive = chunked_divergence(**given, weights=lambda _, rows: weight[rows], vocab_size=300, of=by_definition)
    monkeypatch.setattr(chunked, "torch_chunks", chunks.triton_chunks)  # also where there is no CUDA
    found = chunked_divergence(**given, weights=weights, vocab_size=300, chunk_tokens=chunk)
    assert sum(seen) == 37
    assert max(seen) == min(chunk, 37)
    torch.testing.assert_close(found.loss, naive.loss, **SINGLE)
    mine, other = (torch.autograd.grad(each.loss, receivers) for each in (found, naive))
    for one, another in zip(mine, other, strict=True):
        torch.testing.assert_close(one, another, **SINGLE)


@on_gpu
@pytest.mark.parametrize("chunk", [None, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_chunked_divergence_on_the_gpu_is_that_of_the_definition(dtype: torch.dtype, chunk: int | None) -> None:
    # TRL #5731
    given = heads(5000, dtype)
    weight = torch.rand(37, device=DEVICE)
    weight[4] = 0.0
    found, naive = (
        chunked_divergence(**given, weights=lambda _, rows: weight[rows], vocab_size=5000, chunk_tokens=size, of=of)
        for size, of in ((chunk, reverse_kl), (37, by_definition))
    )
    receivers = [given["hidden_NH"], given["head"].weight_VH]
    mine, other = (torch.autograd.grad(each.loss, receivers) for each in (found, naive))
    torch.testing.assert_close(found.loss, naive.loss, **SINGLE)
    for name in ("value_N", "policy_logprobs_N", "target_logprobs_N", "entropy_N"):
        torch.testing.assert_close(getattr(found, name), getattr(naive, name), **SINGLE)
    for one, another in zip(mine, other, strict=True):
        assert one.dtype == dtype
        error = (one.double() - another.double()).norm() / another.double().norm()
        assert error < (1e-4 if dtype == torch.float32 else 1e-2)
    assert not mine[0][4].any()
    assert not mine[1][5000:].any()


@on_gpu
def test_float32_weights_under_autocast_are_multiplied_in_bfloat16_and_get_a_float32_gradient() -> None:
    given = heads(5000, torch.float32)
    narrow = heads(5000, torch.bfloat16)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = chunked_divergence(**given, weights=lambda p, _: torch.ones_like(p), vocab_size=5000)
    expected = chunked_divergence(**narrow, weights=lambda p, _: torch.ones_like(p), vocab_size=5000)
    torch.testing.assert_close(found.value_N, expected.value_N, **SINGLE)
    found.loss.backward()
    assert given["head"].weight_VH.grad.dtype == torch.float32


@on_gpu
def test_extra_memory_does_not_grow_with_the_tokens() -> None:
    extra = []
    for num_tokens in (1024, 8192):
        hidden = torch.randn(num_tokens, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        head = Head(torch.randn(32768, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True))
        tokens = torch.zeros(num_tokens, dtype=torch.long, device=DEVICE)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = chunked_divergence(
            hidden, head, hidden.detach(), head, tokens,
            weights=lambda p, _: torch.ones_like(p), vocab_size=32768, chunk_tokens=128,
        )  # fmt: skip
        out.loss.backward()
        extra.append(torch.cuda.max_memory_allocated() - before)
    assert extra[1] < extra[0] + 8 * 8192 * 64 * 4
