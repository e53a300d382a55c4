"""`mopdctl gen-sft --from-teachers`: the teachers of a `teachers.yaml` as a committee, its prompts as seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mopdctl.config.gensft import GenConfig
from mopdctl.config.overrides import load_with_overrides
from mopdctl.config.teachers import TeachersFile, load_teachers
from mopdctl.errors import InputError
from mopdctl.files import write_json
from mopdctl.gensft.spec import Spec, prepare
from mopdctl.rollouts.prompts import read_prompts
from mopdctl.runs import Workspace


def prepare_from_teachers(
    path: Path, workspace: Workspace, *, flags: Mapping[str, Any] | None = None, settings: Sequence[str] = ()
) -> Spec:
    """The spec of a data set that the teachers in the file `path` write. Writes nothing that stays.

    Every prompt goes to the one teacher of its domain, and where it names a verifier only answers that pass become
    rows. `flags` and `settings` go over this `gen.yaml`, as in `load_with_overrides`. Raises InputError for a prompt
    that no teacher or several serve, and for what gen-sft cannot do: routing by a second field, tool environments.
    """
    teachers = load_teachers(path)
    routes = _routes(teachers, path)
    _check_prompts(teachers, routes, path)
    # Both files exist for the loader alone: errors and the record speak of the teachers.yaml that they come from.
    with TemporaryDirectory() as folder:
        gen, committee = Path(folder) / "gen.yaml", Path(folder) / "committee.yaml"
        write_json(gen, gen_document(teachers, path))
        write_json(committee, committee_document(teachers, routes, workspace, path.parent))
        try:
            config = load_with_overrides(GenConfig, gen, flags or {}, settings)
            if str(config.committee) != path.name:
                raise InputError(f"{path}: the committee are its teachers; drop committee, or take --config")
            spec = prepare(config.model_copy(update={"committee": committee.absolute()}), workspace, base=path.parent)
        except InputError as error:
            text = str(error).replace(str(gen), f"{path} as gen.yaml")
            raise InputError(text.replace(str(committee.absolute()), str(path))) from None
    record = spec.record | {"config": spec.record["config"] | {"committee": str(config.committee)}}
    return replace(spec, config=config, record=record)


def gen_document(teachers: TeachersFile, path: Path) -> dict[str, Any]:
    """The `gen.yaml` of these teachers."""
    return {
        "name": teachers.name,
        "committee": path.name,
        "seeds": [{"path": str(teachers.prompts)}],
        "seed": teachers.train.seed,
        "select": [{"require_verified": True}],
    }


def committee_document(
    teachers: TeachersFile, routes: Mapping[str, str], workspace: Workspace, base: Path
) -> dict[str, Any]:
    """The `committee.yaml` of these teachers: local models that sample as the loop does, one for each domain."""
    train = teachers.train
    sampling = {"temperature": train.temperature, "max_tokens": train.max_new_tokens}
    return {
        "members": {
            alias: {
                "engine": "hf",
                "model": _model(alias, teacher.model, workspace, base),
                "sampling": sampling,
                "max_concurrency": train.sampling_batch_size,
            }
            for alias, teacher in sorted(teachers.teachers.items())
        },
        "routes": {domain: {"members": {alias: 1}} for domain, alias in sorted(routes.items())},
    }


def _model(alias: str, model: str, workspace: Workspace, base: Path) -> str:
    """A name in the workspace or a hub id as it is, a folder with its whole path. Raises InputError with the alias."""
    try:
        found = Path(workspace.resolve_model(model, relative_to=base))
    except InputError as error:
        raise InputError(f"teacher {alias!r}: {error}") from None
    is_named = found.parent == workspace.root / "checkpoints"
    return str(found.resolve()) if found.is_dir() and not is_named else model


def _routes(teachers: TeachersFile, path: Path) -> dict[str, str]:
    """Domain to its teacher."""
    if teachers.routing_keys != ("domain",):
        keys = ", ".join(teachers.routing_keys)
        raise InputError(
            f"{path}: routing is by {keys}; gen-sft routes by the field 'domain' alone, so give it prompts of one "
            "effort, with routing: domain"
        )
    routes: dict[str, str] = {}
    for alias, teacher in sorted(teachers.teachers.items()):
        for domain in teacher.domains:
            if domain in routes:
                raise InputError(
                    f"{path}: domain {domain!r}: teachers {routes[domain]} and {alias} both serve it; take it out of "
                    "the `domains` of all but one"
                )
            routes[domain] = alias
    return routes


def _check_prompts(teachers: TeachersFile, routes: Mapping[str, str], path: Path) -> None:
    own = [alias for alias, teacher in teachers.teachers.items() if teacher.prompts is not None]
    if teachers.prompts is None or own:
        who = f"teacher {own[0]!r} has prompts of its own" if own else "it names no prompts"
        raise InputError(f"{path}: {who}; gen-sft takes the one common file, so put all prompts there")
    for prompt in read_prompts(path.parent / teachers.prompts, teachers.routing_keys):
        if prompt.routing["domain"] not in routes:
            raise InputError(
                f"{prompt.place}: domain {prompt.routing['domain']!r}: no teacher serves it; teachers serve "
                f"{', '.join(sorted(routes))}"
            )
        if prompt.environment is not None:
            raise InputError(
                f"{prompt.place}: has a tool environment, and gen-sft asks for single answers; take it out, or let "
                "`mopdctl distill --warmup` sample whole conversations"
            )
