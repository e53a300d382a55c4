"""One side of the objective bench: `python -P sides.py SIDE PROBLEM`, PROBLEM being `Problem` as JSON.

Makes the same inputs for every side, then obeys the commands on stdin, one a line, and answers each in a line of JSON:

- `time`: one loss with its gradients. `{"seconds"}`
- `peak`: the same once, for a process that has done nothing before. `{"extra_bytes"}`: memory at its highest, less what
  was there before and less the gradients that come out.
- `check`: the same once, against float64. `{"loss_error", "gradient_error"}`, see `errors`.

The loss is the mean over tokens of the exact reverse KL; the gradients are those of hidden states and head.
"""

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

Step = Callable[["Inputs"], tuple[Tensor, Tensor, Tensor]]
"""Inputs -> (loss, gradient of hidden_NH, gradient of weight_VH)."""


@dataclass(frozen=True)
class Problem:
    """What is asked for. On a CPU, float32 and so many cores; on a GPU, bfloat16."""

    num_tokens: int
    vocab_size: int
    width: int
    teacher_width: int
    device: str = "cpu"
    cores: int = 2


@dataclass(frozen=True)
class Inputs:
    """The student's hidden states and head, which receive a gradient, the teacher's, and the sampled tokens."""

    hidden_NH: Tensor
    weight_VH: Tensor
    target_hidden_NG: Tensor
    target_weight_VG: Tensor
    tokens_N: Tensor


def inputs_of(problem: Problem) -> Inputs:
    """Random inputs whose logits have a standard deviation of 2, the same in every process."""
    draw = torch.Generator(problem.device).manual_seed(0)
    dtype = torch.float32 if problem.device == "cpu" else torch.bfloat16

    def normal(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=draw, device=problem.device, dtype=dtype)

    return Inputs(
        hidden_NH=normal(problem.num_tokens, problem.width).requires_grad_(),
        weight_VH=normal(problem.vocab_size, problem.width).mul_(2 / problem.width**0.5).requires_grad_(),
        target_hidden_NG=normal(problem.num_tokens, problem.teacher_width),
        target_weight_VG=normal(problem.vocab_size, problem.teacher_width).mul_(2 / problem.teacher_width**0.5),
        tokens_N=torch.randint(
            problem.vocab_size, (problem.num_tokens,), generator=draw, device=problem.device, dtype=torch.int64
        ),
    )


# ---------------------------------------------------------------------------------------------------------------- sides


def ours(given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """`chunked_divergence` as it comes."""
    chunked = import_module("mopdctl.objective.chunked")
    make_head = import_module("mopdctl.objective.head").Head
    found = chunked.chunked_divergence(
        given.hidden_NH,
        make_head(given.weight_VH),
        given.target_hidden_NG,
        make_head(given.target_weight_VG),
        given.tokens_N,
        weights=lambda policy_logprobs, rows: torch.full_like(policy_logprobs, 1 / len(given.tokens_N)),
        vocab_size=len(given.weight_VH),
    )
    return _with_gradients(found.loss, given)


def naive(given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """All logits at once, in float32, and autograd: what one writes by hand."""
    policy_NV = torch.log_softmax((given.hidden_NH @ given.weight_VH.T).float(), dim=-1)
    with torch.no_grad():
        target_NV = torch.log_softmax((given.target_hidden_NG @ given.target_weight_VG.T).float(), dim=-1)
    return _with_gradients((policy_NV.exp() * (policy_NV - target_NV)).sum(-1).mean(), given)


def trl(given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel of TRL's distillation trainer; `beta` 1 is its reverse KL."""
    function = import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    divergence_N, _ = function.apply(
        given.hidden_NH, given.weight_VH, None, given.target_hidden_NG, given.target_weight_VG, None, 1.0
    )
    return _with_gradients(divergence_N.mean(), given)


def liger(given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Liger's fused linear JSD; `jsd_beta` 1 is its reverse KL. Its weight gradient summed in float32, as ours is."""
    fused = import_module("liger_kernel.transformers.fused_linear_jsd").LigerFusedLinearJSD
    loss = fused(jsd_beta=1.0, accum_dtype=torch.float32)(
        given.hidden_NH, given.weight_VH, given.target_hidden_NG, given.target_weight_VG, None
    )
    return _with_gradients(loss, given)


def products(given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """No loss: only the four products that every exact method has to make, each at its full size and at once."""
    with torch.no_grad():
        gradient_NV = given.hidden_NH @ given.weight_VH.T
        target_NV = given.target_hidden_NG @ given.target_weight_VG.T
        return target_NV[0, 0], gradient_NV @ given.weight_VH, gradient_NV.T @ given.hidden_NH


SIDES: dict[str, Step] = {"ours": ours, "naive": naive, "trl": trl, "liger": liger, "products": products}


def _with_gradients(loss: Tensor, given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    hidden_gradient, weight_gradient = torch.autograd.grad(loss, [given.hidden_NH, given.weight_VH])
    return loss.detach(), hidden_gradient, weight_gradient


# ------------------------------------------------------------------------------------------------------------- commands


def seconds(step: Step, given: Inputs) -> float:
    """Wall seconds of one step."""
    _wait(given)
    start = time.perf_counter()
    kept = step(given)
    _wait(given)
    spent = time.perf_counter() - start
    del kept
    return spent


def extra_bytes(step: Step, given: Inputs) -> int:
    """Peak memory of one step, less what was there before it and the gradients that it gives."""
    # Libraries, thread pools and code come in at a size that costs nothing.
    small = Problem(8, 64, given.hidden_NH.shape[1], given.target_hidden_NG.shape[1], given.hidden_NH.device.type)
    step(inputs_of(small))
    gc.collect()
    if given.hidden_NH.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made = step(given)
        peak = torch.cuda.max_memory_allocated()
    else:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the highest resident memory so far
        before = _resident("VmRSS")
        made = step(given)
        peak = _resident("VmHWM")
    return peak - before - sum(gradient.nbytes for gradient in made[1:])


def errors(step: Step, given: Inputs) -> dict[str, float]:
    """How far a step is from float64: the loss in nats, gradients relative to the largest entry of the right one."""
    loss, *gradients = step(given)
    right_loss, *right = _float64(given)
    found = {
        "loss_error": abs(float(loss) - float(right_loss)),
        "gradient_error": max(
            float((mine.double() - naive).abs().max() / naive.abs().max())
            for mine, naive in zip(gradients, right, strict=True)
        ),
    }
    if given.hidden_NH.is_cuda:
        del right
        torch.cuda.empty_cache()  # the other side has to fit beside this one
    return found


def _float64(given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The naive loss and its gradients in float64, a few rows at a time so that they fit."""
    weight_VH = given.weight_VH.detach().double().requires_grad_()
    target_weight_VG = given.target_weight_VG.double()
    loss, hidden_gradients = torch.zeros((), dtype=torch.float64, device=weight_VH.device), []
    for start in range(0, len(given.tokens_N), 64):
        hidden_CH = given.hidden_NH.detach()[start : start + 64].double().requires_grad_()
        policy_CV = torch.log_softmax(hidden_CH @ weight_VH.T, dim=-1)
        target_CV = torch.log_softmax(given.target_hidden_NG[start : start + 64].double() @ target_weight_VG.T, dim=-1)
        part = (policy_CV.exp() * (policy_CV - target_CV)).sum() / len(given.tokens_N)
        part.backward()  # type: ignore[no-untyped-call]
        assert hidden_CH.grad is not None
        hidden_gradients.append(hidden_CH.grad)
        loss += part.detach()
    assert weight_VH.grad is not None
    return loss, torch.cat(hidden_gradients), weight_VH.grad


def _wait(given: Inputs) -> None:
    if given.hidden_NH.is_cuda:
        torch.cuda.synchronize()


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def main(side: str, problem: str) -> None:
    """Obeys the commands on stdin until it ends."""
    asked = Problem(**json.loads(problem))
    if asked.device == "cpu":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: asked.cores])
        torch.set_num_threads(asked.cores)
    torch.zeros(1).exp().log()  # from one thread: several that make MKL's first call together may get a crude kernel
    step, given = SIDES[side], inputs_of(asked)
    commands: dict[str, Callable[[], dict[str, float]]] = {
        "time": lambda: {"seconds": seconds(step, given)},
        "peak": lambda: {"extra_bytes": extra_bytes(step, given)},
        "check": lambda: errors(step, given),
    }
    for line in sys.stdin:
        print(json.dumps(commands[line.strip()]()), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
