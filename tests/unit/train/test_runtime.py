"""The runtime of commands: idle threads, and vector math settled by one thread before many use it (pytorch#188792)."""

import os
from typing import Any

import pytest


@pytest.mark.parametrize("own", [None, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_idle_threads_spin_for_a_moment_unless_the_user_says_otherwise(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mopdctl.train.runtime import IDLE_SPINS, prepare_runtime

    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    if own:
        monkeypatch.setenv(own, "1")
    prepare_runtime()
    found = {name: os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if name in os.environ}
    assert found == ({own: "1"} if own else {"GOMP_SPINCOUNT": IDLE_SPINS})


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
