"""Matrices for tests of quantized numbers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Make = Callable[..., Tensor]


@pytest.fixture(scope="session")
def matrix() -> Make:
    """Makes a matrix by kind: `gauss`; `tails`, Student's t of 3 degrees; `lattice`, few values, many ties; `flat`."""

    def make(kind: str = "gauss", rows: int = 8, columns: int = 128, *, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(5, rows, columns, generator=generator)
        if kind == "gauss":
            return 0.02 * normal[0]
        if kind == "tails":
            return 0.02 * normal[0] / normal[1:4].square().mean(0).sqrt()
        if kind == "lattice":
            return (normal[0] * 4).round() / 8
        assert kind == "flat"
        return torch.rand(rows, columns, generator=generator) - 0.5

    return make
