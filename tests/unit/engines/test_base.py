import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.engines.base import stream_seed, uniforms


@given(st.integers(0, 2**128 - 1), st.integers(0, 40), st.integers(0, 40))
def test_number_t_of_a_stream_does_not_depend_on_how_many_are_drawn(seed: int, short: int, more: int) -> None:
    assert np.array_equal(uniforms(seed, short + more)[:short], uniforms(seed, short))


def test_stream_seeds_are_fixed_for_ever() -> None:
    # A change here changes every run that anyone has made.
    assert stream_seed(0, "rollout", "a/1") == 325392995038522521078841245126448076883
    assert uniforms(stream_seed(0, "rollout", "a/1"), 2).tolist() == [0.8444757254890735, 0.4597106245156103]


def test_stream_seeds_tell_parts_and_types_apart() -> None:
    parts = [(0, "ab", "c"), (0, "a", "bc"), ("0", "ab", "c"), (0, "abc"), (1, "ab", "c"), (0, "ab", "c", None)]
    seeds = [stream_seed(*p) for p in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= s < 2**128 for s in seeds)


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    drawn = np.concatenate([uniforms(stream_seed(i), 50) for i in range(400)])
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    shares = np.histogram(drawn, bins=10, range=(0.0, 1.0))[0] / drawn.size
    # five standard deviations of a share of 0.1 in 20000 draws
    assert np.abs(shares - 0.1).max() < 5 * np.sqrt(0.1 * 0.9 / drawn.size)
