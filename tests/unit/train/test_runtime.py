"""Vector math is settled by one thread before many use it (https://github.com/pytorch/pytorch/issues/188792)."""

import os
import subprocess
import sys
from typing import Any

import pytest

FIRST_EXP = """
import torch
from mopdctl.train.runtime import settle_libraries
torch.set_num_threads(2)
generator = torch.Generator().manual_seed(0)
hidden, head = torch.randn(512, 256, generator=generator), torch.randn(32768, 256, generator=generator) / 8
settle_libraries()
log_p = torch.log_softmax(hidden @ head.T, -1)
p = log_p.exp()
exact = log_p.double().exp()
print(((p.double() - exact).abs() / exact).max().item())
"""


def test_settling_calls_every_vector_function_in_both_precisions_with_one_element() -> None:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from mopdctl.train.runtime import settle_vector_math

    called = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if args and isinstance(args[0], torch.Tensor):
                called.add((func.overloadpacket.__name__, args[0].dtype, args[0].numel()))
            return func(*args, **(kwargs or {}))

    with Watch():
        settle_vector_math()
    for dtype in (torch.float32, torch.float64):
        assert {(name, dtype, 1) for name in ("exp", "log", "sqrt", "tanh", "erf", "sin", "cos", "expm1")} <= called


@pytest.mark.slow
def test_the_first_exp_of_a_process_on_two_threads_is_as_exact_as_any() -> None:
    """Without settling about one process of eight is off by 1.5e-4 where two cores are free."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    for _ in range(8):
        told = subprocess.run([sys.executable, "-c", FIRST_EXP], env=environment, capture_output=True, text=True)
        assert told.returncode == 0, told.stderr
        assert float(told.stdout) < 1e-6
