"""The methods by name. Each takes one tensor at a time, and one teacher's at a time."""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from mopdctl.config.merge import MergeConfig
from mopdctl.distill.merging.arithmetic import task_arithmetic
from mopdctl.distill.merging.linear import linear
from mopdctl.distill.merging.ties import ties

Combine = Callable[[Tensor, Iterable[Tensor], Sequence[float]], Tensor]
"""(the student's tensor, that of each teacher, a scale per teacher) -> the merged tensor, of the same shape.

Teachers are gone through once and in order, so that they may be read as they are needed. All are float64, so that one
teacher at scale 1 is that teacher once rounded to float32: to the bit, but for weights 2^29 times smaller than the
student's.
"""


def method_of(how: MergeConfig) -> Combine:
    """The function behind a method's name."""
    found: dict[str, Combine] = {"task-arithmetic": task_arithmetic, "linear": linear, "ties": ties(how.density)}
    return found[how.method]
