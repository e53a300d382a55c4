"""The prompts of a run, and the rule that says which teachers may serve each."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.draw import assigned, checked_sampling_weights, read_pools
from mopdctl.distill.tiers import SPECIALIST, Serving, by_tier, check_tiers, needs_confidence
from mopdctl.errors import InputError
from mopdctl.files import file_digest
from mopdctl.records import Prompt


@dataclass(frozen=True, slots=True)
class RunPrompts:
    """The prompts of a run."""

    prompts: list[Prompt]
    serving: list[Serving]
    """Tier to teacher, for each."""

    @property
    def is_tiered(self) -> bool:
        """Whether some prompt has several teachers, of which a profile picks one."""
        return any(len(found) > 1 for found in self.serving)

    @property
    def first_choice(self) -> list[str]:
        """The teacher of each prompt as long as nothing is known of it: its only one, or that of tier 2."""
        return [found.get(SPECIALIST) or next(iter(found.values())) for found in self.serving]

    def per_teacher(self) -> dict[str, int]:
        """Alias to how many prompts it may get."""
        return dict(sorted(Counter(alias for found in self.serving for alias in found.values()).items()))


def read_run_prompts(config: TeachersFile, *, base: Path) -> RunPrompts:
    """All prompts of a run, the common ones and those of single teachers; see `serve`."""
    return serve(*read_pools(config, common_file(config, base), own_files(config, base)), config)


def common_file(config: TeachersFile, base: Path) -> Path | None:
    """The prompt file of all teachers, if there is one."""
    return None if config.prompts is None else base / config.prompts


def own_files(config: TeachersFile, base: Path) -> dict[str, Path]:
    """Alias to the prompt file that is the teacher's alone."""
    return {alias: base / teacher.prompts for alias, teacher in config.teachers.items() if teacher.prompts is not None}


def prompt_digests(config: TeachersFile, base: Path) -> dict[str, str | None]:
    """The digest of the common file under the empty name, and of teachers' own files under theirs."""
    common = common_file(config, base)
    own = {alias: file_digest(path) for alias, path in sorted(own_files(config, base).items())}
    return {"": file_digest(common) if common else None, **own}


def serve(prompts: list[Prompt], owners: Sequence[str | None], config: TeachersFile) -> RunPrompts:
    """The prompts, each with the teachers that may serve it; `owners` has the teacher of a prompt that is his alone.

    Raises InputError, before anything is loaded, for a prompt without a teacher or with two of one tier, a teacher
    without a prompt, and settings of tiers or draw that cannot be met.
    """
    assigned(prompts, owners, lambda prompt: checked_teacher(prompt, config))
    serving: list[Serving] = [
        {config.teachers[owner].tier: owner} if owner else serving_of(prompt, config)
        for prompt, owner in zip(prompts, owners, strict=True)
    ]
    found = RunPrompts(prompts, serving)
    counts = found.per_teacher()
    idle = [alias for alias in config.teachers if alias not in counts]
    if idle:
        raise InputError(f"teacher {idle[0]!r}: no prompt routes to it; remove it or add prompts of its domains")
    if found.is_tiered:
        if config.tiers is None:
            place = next(p.place for p, f in zip(prompts, serving, strict=True) if len(f) > 1)
            raise InputError(f"{place}: teachers of several tiers serve it; say under `tiers:` which gets what")
        check_tiers(prompts, serving, config.tiers)
        _check_confidence(found, config)
    checked_sampling_weights({alias: teacher.sampling_weight for alias, teacher in config.teachers.items()})
    return found


def _check_confidence(found: RunPrompts, config: TeachersFile) -> None:
    """Raises InputError for a black box in tier 2 where a threshold asks for its confidence."""
    for prompt, teachers in zip(found.prompts, found.serving, strict=True):
        threshold = needs_confidence(teachers, config.tiers) if config.tiers is not None else None
        if threshold and config.teachers[teachers[SPECIALIST]].is_black_box:
            raise InputError(
                f"{prompt.place}: teacher {teachers[SPECIALIST]!r} is a black box, and {threshold} needs its "
                "confidence; set the threshold to null"
            )


def serving_of(prompt: Prompt, config: TeachersFile) -> Serving:
    """Tier to teacher of a common prompt. Raises InputError if no teacher serves it, or two of one tier do."""
    return by_tier(
        _candidates(prompt.routing, config),
        {alias: teacher.tier for alias, teacher in config.teachers.items()},
        place=prompt.place,
    )


def teacher_of(routing: dict[str, str], config: TeachersFile) -> str:
    """The alias of the one teacher that serves a prompt; of several tiers, that of tier 2.

    Raises InputError if none does, or several of one tier do.
    """
    found = _candidates(routing, config)
    where = " ".join(f"{key} {value!r}" for key, value in routing.items())
    if not found:
        known = sorted({d for t in config.teachers.values() for d in t.domains})
        raise InputError(f"{where}: no teacher serves it; teachers serve {', '.join(known)}")
    tiers = [config.teachers[alias].tier for alias in found]
    if len(set(tiers)) < len(tiers):
        names = " and ".join(sorted(alias for alias in found if tiers.count(config.teachers[alias].tier) > 1))
        raise InputError(f"{where}: teachers {names} both serve it; take it out of the `domains` of all but one")
    return min(found, key=lambda alias: (config.teachers[alias].tier != SPECIALIST, config.teachers[alias].tier))


def _candidates(routing: dict[str, str], config: TeachersFile) -> list[str]:
    domain, *others = (routing[key] for key in config.routing_keys)
    effort = others[0] if others else None
    return [
        alias
        for alias, teacher in config.teachers.items()
        if domain in teacher.domains and (effort is None or not teacher.efforts or effort in teacher.efforts)
    ]


def checked_teacher(prompt: Prompt, config: TeachersFile) -> str:
    """The alias of a prompt's teacher. Raises InputError with the prompt's place, for an unknown effort too."""
    if len(config.routing_keys) > 1 and config.efforts:
        effort = prompt.routing[config.routing_keys[1]]
        if effort not in config.efforts:
            raise InputError(f"{prompt.place}: unknown effort {effort!r}; efforts: {', '.join(config.efforts)}")
    try:
        return teacher_of(prompt.routing, config)
    except InputError as error:
        raise InputError(f"{prompt.place}: {error}") from None
