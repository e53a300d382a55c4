"""Vector math is settled by one thread before many use it (https://github.com/pytorch/pytorch/issues/188792)."""

from typing import Any


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
