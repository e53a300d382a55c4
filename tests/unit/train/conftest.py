from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def make_model64(make_llama: Callable[..., Any], tokenizer: Any) -> Callable[..., Any]:
    """Makes a trainable float64 model, so that only a wrong sum can move a gradient by more than rounding."""
    import torch

    from mopdctl.engines.hf import HFModel

    def make(*, seed: int = 0, **changes: Any) -> HFModel:
        llama = make_llama(seed=seed, **changes).double()
        return HFModel(llama, tokenizer, dtype=torch.float64)

    return make


@pytest.fixture
def model64(make_model64: Callable[..., Any]) -> Any:
    return make_model64()
