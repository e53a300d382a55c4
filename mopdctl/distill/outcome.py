"""The group-relative advantage of verified answers, beside what teachers say of their tokens."""

from collections.abc import Sequence

from mopdctl.errors import MopdctlError
from mopdctl.objective.group import group_advantages
from mopdctl.records import Sample
from mopdctl.rollouts.verdicts import earned
from mopdctl.train import distributed


def outcome_advantages(samples: Sequence[Sample], step: int) -> dict[str, float]:
    """A_ORM of this rank's samples by id, within the groups of all ranks.

    A sample that nobody could check, and one alone in its group, has 0: the teacher's word on it stands alone. Raises
    MopdctlError if there are answers and not one of the step could be checked.

    Source: MiMo-V2-Flash, Eq. 9 (A_ORM, e.g. of GRPO); see `objective.group`.
    """
    groups: dict[str, list[tuple[str, float]]] = {}
    everyone = distributed.gather_objects([(s.group_id, s.sample_id, earned(s.reward, s.verdict)) for s in samples])
    for group_id, sample_id, reward in (one for found in everyone for one in found):
        if reward is not None:
            groups.setdefault(group_id, []).append((sample_id, reward))
    if any(everyone) and not groups:
        raise MopdctlError(f"step {step}: no answer could be checked; `mopdctl doctor verifiers` tries the checks")
    found: dict[str, float] = {sample.sample_id: 0.0 for sample in samples}
    for members in groups.values():
        if len(members) > 1:
            advantages = group_advantages([reward for _, reward in members])
            found |= {i: a for (i, _), a in zip(members, advantages, strict=True) if i in found}
    return found
