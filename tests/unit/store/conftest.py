"""Samples of any size for tests of the store."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mopdctl.records import Sample


@pytest.fixture(scope="session")
def make_sample() -> Callable[..., Sample]:
    """Sample `number` of a seeded world, with teacher log-probabilities unless told otherwise. Keywords replace."""

    def make(number: int, *, length: int | None = None, scored: bool = True, **changes: Any) -> Sample:
        rng = np.random.default_rng(number)
        prompt = int(rng.integers(1, 9))
        response = length or int(rng.integers(1, 60))
        fields: dict[str, Any] = {
            "sample_id": f"p{number}/0@0",
            "prompt_id": f"p{number}",
            "group_id": f"p{number}",
            "generation_index": 0,
            "domain": ("math", "code")[number % 2],
            "teacher_id": ("m", "c")[number % 2],
            "policy_version_min": number // 10,
            "policy_version_max": number // 10,
            "tokens": rng.integers(0, 5000, prompt + response).astype(np.int32),
            "prompt_length": prompt,
            "loss_mask": np.array([False] * prompt + [True] * response),
            "behavior_logprobs": -rng.random(response).astype(np.float32),
            "finish_reason": ("stop", "length")[number % 3 == 0],
            "tokenizer_fingerprint": "t",
            "sampling_fingerprint": "s",
            "teacher_logprobs": -rng.random(response).astype(np.float32) if scored else None,
        }
        return Sample(**fields | changes)

    return make


@pytest.fixture(scope="session")
def same() -> Callable[[Sample, Sample], bool]:
    """Whether two samples are equal in every field, to the bit."""

    def equal(one: Sample, other: Sample) -> bool:
        def bits(value: Any) -> Any:
            return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value

        return all(bits(getattr(one, n)) == bits(getattr(other, n)) for n in Sample.__dataclass_fields__)

    return equal
