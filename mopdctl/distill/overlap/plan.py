"""What `mopdctl overlap` is asked for, and what follows from that before any model is loaded."""

from dataclasses import dataclass, field
from pathlib import Path

from mopdctl.config.teachers import Teacher, TeachersFile
from mopdctl.distill.draw import read_pools
from mopdctl.distill.overlap.answers import pick
from mopdctl.distill.overlap.candidates import read_candidates, the_domain
from mopdctl.distill.overlap.compare import Room
from mopdctl.distill.prompts import checked_teacher, common_file, own_files
from mopdctl.distill.teachers import teacher_source
from mopdctl.engines.adapters import Source
from mopdctl.errors import InputError
from mopdctl.records import Prompt
from mopdctl.rollouts.verdicts import check_verifiable
from mopdctl.runs import Workspace, check_name
from mopdctl.verifiers.pool import VerifierPool


@dataclass(frozen=True, slots=True)
class OverlapSpec:
    """What `mopdctl overlap` is asked for."""

    config: TeachersFile
    base: Path
    """Folder that relative paths of the configuration start from."""
    name: str | None = None
    """Name of the report; None takes the student's."""
    samples: int = 4
    """Answers per prompt."""
    limit: int = 64
    """Prompts per teacher."""
    top_k: int = 16
    """Tokens that count as support."""
    candidates: str | None = None
    """`alias=model,...` or a YAML file."""
    domain: str | None = None
    """The domain that the candidates are for; None takes the only one."""
    room: Room = field(default_factory=Room)
    """What is held in memory at one time."""

    @property
    def report_name(self) -> str:
        """The name of the report."""
        return check_name(self.name or Path(self.config.student).name)

    @property
    def store_name(self) -> str:
        """The name of the rollout store."""
        return check_name(f"overlap-{self.report_name}")


@dataclass(frozen=True, slots=True)
class Seat:
    """Someone whose support is measured, and the prompts that it is measured on."""

    alias: str
    teacher: Teacher
    source: Source
    """Where its weights lie."""
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Who is measured on what."""

    prompts: list[Prompt]
    prompt_files: list[Path]
    student: str
    """What transformers loads."""
    teachers: tuple[Seat, ...]
    candidates: tuple[Seat, ...]
    """All that are ranked, the domain's present teachers among them; empty if none are asked for."""
    domain: str | None
    """The domain that the candidates are for."""

    @property
    def rows(self) -> list[int]:
        """All prompts that the student answers."""
        return sorted({row for seat in self.teachers for row in seat.rows})


def make_plan(spec: OverlapSpec, workspace: Workspace, pool: VerifierPool) -> Plan:
    """Reads and checks all that needs no model: prompts, verifiers, routing, model arguments, candidates."""
    config = spec.config
    common, own = common_file(config, spec.base), own_files(config, spec.base)
    prompts, owners = read_pools(config, common, own)
    check_verifiable(prompts, pool)
    served = [[owner] if owner else _serving(prompt, config) for prompt, owner in zip(prompts, owners, strict=True)]
    rows = {}
    for alias, teacher in sorted(config.teachers.items()):
        theirs = [row for row, aliases in enumerate(served) if alias in aliases]
        if not theirs:
            raise InputError(f"teacher {alias!r}: no prompt routes to it; remove it or add prompts of its domains")
        if not teacher.is_black_box:
            rows[alias] = pick(prompts, theirs, limit=spec.limit, seed=config.train.seed)
    if not rows:
        raise InputError("teachers: all are black boxes, which give no probabilities that a student could overlap with")
    candidates: dict[str, Teacher] = {}
    domain: str | None = None
    of_domain: tuple[int, ...] = ()
    if spec.candidates is not None:
        domain = the_domain(config, spec.domain)
        candidates = read_candidates(spec.candidates, config, domain)
        key = config.routing_keys[0]
        of_domain = tuple(row for row in sorted(set().union(*rows.values())) if prompts[row].routing[key] == domain)
        if not of_domain:
            raise InputError(f"--domain {domain!r}: none of the chosen prompts is of it; raise --limit or add prompts")
    elif spec.domain is not None:
        raise InputError("--domain: has no meaning without --candidates, which says which models to rank")

    def seat(alias: str, teacher: Teacher, of: tuple[int, ...]) -> Seat:
        return Seat(alias, teacher, teacher_source(alias, teacher, workspace, base=spec.base), of)

    return Plan(
        prompts,
        [*([common] if common else []), *own.values()],
        workspace.resolve_model(config.student, relative_to=spec.base),
        teachers=tuple(seat(alias, config.teachers[alias], of) for alias, of in rows.items()),
        candidates=tuple(seat(alias, teacher, of_domain) for alias, teacher in candidates.items()),
        domain=domain,
    )


def _serving(prompt: Prompt, config: TeachersFile) -> list[str]:
    """The aliases of a prompt's teachers: one, or with `tiers` one of each tier, whichever the run will take."""
    if config.tiers is None:
        return [checked_teacher(prompt, config)]
    domain, effort = (*(prompt.routing[key] for key in config.routing_keys), None)[:2]
    found = [
        alias
        for alias, teacher in config.teachers.items()
        if domain in teacher.domains and (effort is None or not teacher.efforts or effort in teacher.efforts)
    ]
    if not found:
        raise InputError(f"{prompt.place}: no teacher serves {config.routing_keys[0]} {domain!r}")
    return found
