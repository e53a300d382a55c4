"""A gen.yaml with all that it names, found and checked; and whether the data set that it describes is there already."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopdctl.config.base import load_config
from mopdctl.config.committee import CommitteeFile, Sampling
from mopdctl.config.gensft import GenConfig, SeedSource
from mopdctl.errors import InputError
from mopdctl.files import file_digest, fingerprint, read_json
from mopdctl.gensft.assess import filter_settings
from mopdctl.gensft.judge import check_panel
from mopdctl.gensft.members import endpoint
from mopdctl.gensft.prior import prior_digest
from mopdctl.gensft.question_index import allowed_texts
from mopdctl.gensft.questions import read_questions
from mopdctl.gensft.routing import Router
from mopdctl.gensft.seeds import check_sources
from mopdctl.runs import Workspace, told_differences

# What may change from one run to the next without making another data set: how fast and how far, and with which key.
_PACE = {"max_concurrency", "requests_per_minute", "tokens_per_minute", "timeout_s", "max_attempts", "api_key_env"}
_BOUNDS = {"max_cost", "max_tokens", "reuse"}


@dataclass(frozen=True, slots=True)
class Spec:
    """What one run is asked for."""

    config: GenConfig
    committee: CommitteeFile
    base: Path
    """What relative paths start from."""
    workspace: Workspace
    record: dict[str, Any]
    """All that the data set depends on; its fingerprint tells two data sets apart."""
    router: Router

    @property
    def folder(self) -> Path:
        """Where the run keeps its plan and its journal."""
        return run_folder(self.workspace, self.config.name)

    @property
    def target(self) -> Path:
        """The data set."""
        return self.workspace.dataset(self.config.name)

    @property
    def aliases(self) -> list[str]:
        """Members that may be asked."""
        return _aliases(self.config, self.committee)


def run_folder(workspace: Workspace, name: str) -> Path:
    """The run of a data set, apart from a training run of the same name: its journal was paid for."""
    workspace.dataset(name)
    return workspace.run(f"{name[:91]}.gen-sft")


def prepare(config: GenConfig, workspace: Workspace, *, base: Path) -> Spec:
    """Checks everything that can be checked without reading the seeds or asking anybody. Writes nothing."""
    workspace.dataset(config.name)
    committee = load_config(CommitteeFile, base / config.committee)
    for panel in config.judges:
        check_panel(panel)
        for alias in panel.members:
            if alias not in committee.members:
                known = ", ".join(sorted(committee.members))
                raise InputError(f"{base / config.committee}: judge {alias!r} is no member (has: {known})")
    filter_settings(config.filter)
    check_sources(config.seeds, base)
    allowed_texts(base / path for path in config.decontaminate.allow)
    for path in config.decontaminate.files:
        for _ in read_questions(base / path):
            pass
    _check_budget(config, committee)
    endpoints = {alias: endpoint(committee.members[alias], workspace) for alias in _aliases(config, committee)}
    record = {
        "config": config.model_dump(mode="json", exclude=_BOUNDS),
        "committee": committee.model_dump(mode="json", exclude={"members": dict.fromkeys(committee.members, _PACE)}),
        "endpoints": endpoints,
        "seeds": [_source_digest(source, base) for source in config.seeds],
        "files": {
            str(path): file_digest(base / path) for path in [*config.decontaminate.files, *config.decontaminate.allow]
        },
        "against": {name: prior_digest(workspace, base, name) for name in config.dedup.against},
    }
    router = Router(committee, endpoints, samples=config.samples, seed=config.seed)
    return Spec(config, committee, base, workspace, record, router)


def _source_digest(source: SeedSource, base: Path) -> str | None:
    """What a source holds; None for attributes, which the configuration holds, and for the hub's `revision`."""
    if source.path is not None:
        return file_digest(base / source.path)
    folder = base / source.dataset if source.dataset else None
    if folder is None or not folder.is_dir():
        return None
    return fingerprint({str(p.relative_to(folder)): file_digest(p) for p in sorted(folder.rglob("*")) if p.is_file()})


def _aliases(config: GenConfig, committee: CommitteeFile) -> list[str]:
    routed = {alias for route in committee.routes.values() for alias in route.aliases}
    return sorted(routed | {alias for panel in config.judges for alias in panel.members})


def _check_budget(config: GenConfig, committee: CommitteeFile) -> None:
    """A budget can be kept only where the most that a request can take is known."""
    if config.max_cost is None and config.max_tokens is None:
        return
    asked = [(a, r.sampling.over(committee.members[a].sampling)) for r in committee.routes.values() for a in r.aliases]
    asked += [(a, committee.members[a].sampling) for p in config.judges if p.kind != "reward" for a in p.members]
    for alias, sampling in asked:
        if config.max_cost is not None and committee.members[alias].price is None:
            raise InputError(f"max_cost: the price of member {alias!r} is unknown; give it a price (0 if it is free)")
        if not _bounded(sampling):
            raise InputError(f"a budget needs a bound on every answer: give member {alias!r} sampling.max_tokens")


def _bounded(sampling: Sampling) -> bool:
    return sampling.max_tokens is not None or isinstance(sampling.extra.get("max_completion_tokens"), int)


def finished(spec: Spec, *, replace: bool = False) -> dict[str, Any] | None:
    """The manifest of the data set if it is there, whole and complete; None if there is work to do.

    Raises InputError if something else has its name, unless it may be replaced.
    """
    path = spec.target / "manifest.json"
    if not spec.target.exists():
        return None
    if not path.exists():
        raise InputError(f"{spec.target}: exists and was not made by gen-sft; use another name")
    if replace:
        return None
    found = read_json(path)
    if not _is_manifest(found):
        raise InputError(f"{path}: damaged; --replace builds the data set anew from the answers that are kept")
    if found["fingerprint"] != fingerprint(spec.record):
        how = told_differences(found["record"], spec.record)
        raise InputError(
            f"{spec.target}: made with other settings ({how}); use another name with `reuse: "
            f"[{spec.config.name}]`, which pays for no answer twice, or --replace"
        )
    whole = all(_bytes(spec.target / name) == entry["bytes"] for name, entry in found["files"].items())
    return found if found["complete"] and whole else None


def _is_manifest(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and {"fingerprint", "complete"} <= found.keys()
        and isinstance(found.get("record"), dict)
        and isinstance(found.get("files"), dict)
        and all(isinstance(entry, dict) and "bytes" in entry for entry in found["files"].values())
    )


def _bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1
