"""The Wilson interval of a mean of outcomes in [0, 1]."""

import math

Z_95 = 1.959963984540054
"""The 97.5 % point of the standard normal distribution."""


def wilson(mean: float, count: int, *, z: float = Z_95) -> tuple[float, float]:
    """The score interval of a mean over `count` outcomes, inside [0, 1] and never empty (Wilson 1927).

    For outcomes of 0 and 1 it covers as its level says. Fractions in between vary less than those with the same mean,
    so for them it is too wide rather than too narrow. Raises ValueError unless `count` is at least 1.
    """
    if count < 1:
        raise ValueError("an interval needs at least one outcome")
    spread = z * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    scale, middle = 1 + z * z / count, mean + z * z / (2 * count)
    low, high = (middle - spread) / scale, (middle + spread) / scale
    return max(0.0, min(low, mean)), min(1.0, max(high, mean))
