"""`mopdctl gen-sft`: plan the seeds, ask the members, ask the judges, build the data set.

A run's folder holds `seeds.jsonl` (the plan), `journal.jsonl` (every raw response) and nothing else that matters.
Asking goes on where the journal ends; everything after it is computed anew.
"""

import asyncio
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mopdctl.config.base import load_config
from mopdctl.config.committee import CommitteeFile
from mopdctl.config.gensft import GenConfig
from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import file_digest, fingerprint, read_json, write_json
from mopdctl.gensft.ask import Asking, Progress, Request, Spending, estimated_tokens
from mopdctl.gensft.assess import Assessor, filter_settings
from mopdctl.gensft.build import Report, build
from mopdctl.gensft.card import card, manifest
from mopdctl.gensft.decontaminate import Document, allowed_texts
from mopdctl.gensft.journal import Journal
from mopdctl.gensft.judge import check_panel
from mopdctl.gensft.members import endpoint, enlist
from mopdctl.gensft.prior import prior_digest, read_texts
from mopdctl.gensft.questions import read_questions
from mopdctl.gensft.records import Seed
from mopdctl.gensft.routing import Router
from mopdctl.gensft.seeds import check_sources, read_plan, read_seeds, write_plan
from mopdctl.gensft.verify import check_verifier
from mopdctl.runs import Workspace, building, differing_keys, locked

TaskDocuments = Callable[[list[str]], Iterable[Document]]
OnProgress = Callable[[str, Progress, Spending], None]
"""(phase, figures of the phase, what was spent since the command began)"""

# What may change from one run to the next without making another data set: how fast and how far, and with which key.
_PACE = {"max_concurrency", "requests_per_minute", "tokens_per_minute", "timeout_s", "max_attempts", "api_key_env"}
_BOUNDS = {"max_cost", "max_tokens", "reuse"}


@dataclass(frozen=True, slots=True)
class Spec:
    """A configuration with what it names, found and checked."""

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
        return self.workspace.run(self.config.name)

    @property
    def target(self) -> Path:
        """The data set."""
        return self.workspace.dataset(self.config.name)


def prepare(config: GenConfig, workspace: Workspace, *, base: Path) -> Spec:
    """Checks everything that can be checked without reading the seeds or asking anybody. Writes nothing."""
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
    _check_budget(config, committee)
    aliases = _aliases_in_use(config, committee)
    endpoints = {alias: endpoint(committee.members[alias], workspace) for alias in aliases}
    files = [source.path for source in config.seeds if source.path] + config.decontaminate.files
    record = {
        "config": config.model_dump(mode="json", exclude=_BOUNDS),
        "committee": committee.model_dump(mode="json", exclude={"members": dict.fromkeys(committee.members, _PACE)}),
        "endpoints": endpoints,
        "files": {str(p): _digest(base / p) for p in [*files, *config.decontaminate.allow]},
        "against": {name: prior_digest(workspace, base, name) for name in config.dedup.against},
    }
    workspace.dataset(config.name)
    router = Router(committee, endpoints, samples=config.samples, seed=config.seed)
    return Spec(config, committee, base, workspace, record, router)


def _digest(path: Path) -> str:
    if not path.is_file():
        raise InputError(f"{path}: no such file; check the path")
    return file_digest(path)


def _aliases_in_use(config: GenConfig, committee: CommitteeFile) -> list[str]:
    routed = {alias for route in committee.routes.values() for alias in route.aliases}
    return sorted(routed | {alias for panel in config.judges for alias in panel.members})


def _check_budget(config: GenConfig, committee: CommitteeFile) -> None:
    if config.max_cost is None:
        return
    for alias in _aliases_in_use(config, committee):
        if committee.members[alias].price is None:
            raise InputError(f"max_cost: the price of member {alias!r} is unknown; give it a price (0 if it is free)")


def finished(spec: Spec, *, replace: bool = False) -> dict[str, Any] | None:
    """The manifest of the data set if it is there and complete.

    Raises InputError if something else has its name, unless it may be replaced.
    """
    path = spec.target / "manifest.json"
    if not spec.target.exists():
        return None
    if not path.exists():
        raise InputError(f"{spec.target}: exists and was not made by gen-sft; use another name")
    found = dict(read_json(path))
    if found["fingerprint"] != fingerprint(spec.record):
        if replace:
            return None
        keys = ", ".join(differing_keys(found["record"], spec.record)[:5])
        raise InputError(
            f"{spec.target}: made with other settings ({keys} differ); use another name with `reuse: "
            f"[{spec.config.name}]`, which pays for no answer twice, or --replace"
        )
    return found if found["complete"] else None


def dry_run(spec: Spec) -> dict[str, Any]:
    """One rendered request per domain, and what all of it may cost. Reads the seeds; writes nothing, asks nobody."""
    seeds: dict[str, int] = {}
    examples: dict[str, Any] = {}
    members: dict[str, dict[str, Any]] = {}
    quarantined = 0

    def quarantine(entry: dict[str, Any]) -> None:
        nonlocal quarantined
        quarantined += 1

    for seed in read_seeds(spec.config.seeds, base=spec.base, limit=spec.config.limit, quarantine=quarantine):
        check_verifier(seed)
        seeds[seed.domain] = seeds.get(seed.domain, 0) + 1
        for _, chain in spec.router.chains(seed):
            request = chain[0]
            examples.setdefault(seed.domain, {"member": request.member, "body": request.body})
            _estimate(spec, members, request)
        panel = spec.config.panel(seed.domain)
        for alias in panel.members if panel else []:
            for _ in range(spec.router.samples(seed)):
                example = spec.router.judge_request(alias, seed, list(seed.messages), "chat")
                _estimate(spec, members, example)
    costs = [found["most_cost_usd"] for found in members.values()]
    return {
        "name": spec.config.name,
        "seeds": sum(seeds.values()),
        "seeds_by_domain": seeds,
        "quarantined": quarantined,
        "requests": sum(found["requests"] for found in members.values()),
        "most_cost_usd": None if any(cost is None for cost in costs) else round(sum(costs), 6),
        "members": members,
        "examples": examples,
    }


def _estimate(spec: Spec, members: dict[str, dict[str, Any]], request: Request) -> None:
    prompt, most = estimated_tokens(request.body)
    price = spec.committee.members[request.member].price
    empty = {"requests": 0, "prompt_tokens": 0, "most_completion_tokens": 0, "most_cost_usd": 0.0 if price else None}
    found = members.setdefault(request.member, empty)
    found["requests"] += 1
    found["prompt_tokens"] += prompt
    found["most_completion_tokens"] += most
    if price:
        found["most_cost_usd"] = round(found["most_cost_usd"] + price.cost_usd(prompt, most), 6)


def run(
    spec: Spec,
    *,
    task_documents: TaskDocuments = lambda tasks: (),
    replace: bool = False,
    preview: bool = False,
    on_progress: OnProgress = lambda phase, progress, spending: None,
    on_note: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Makes the data set, or what is left to make of it, and returns its manifest with what this command did.

    `preview` leaves the data set in the run's folder, as `preview/`, and publishes nothing. Raises KeyboardInterrupt
    after an interrupt, once the answers under way are in the journal.
    """
    if not preview and (done := finished(spec, replace=replace)):
        return done | {"requests": 0}
    with locked(spec.folder):
        if not preview and (done := finished(spec, replace=replace)):
            return done | {"requests": 0}
        total = _plan(spec, on_note)
        plan = partial(read_plan, spec.folder / "seeds.jsonl", limit=spec.config.limit)
        reuse = [spec.workspace.run(name) / "journal.jsonl" for name in spec.config.reuse]
        for path in reuse:
            if not path.exists():
                raise InputError(f"reuse: {path}: no such journal; name a data set whose run is in the workspace")
        journal = Journal(spec.folder / "journal.jsonl", reuse=reuse)
        try:
            for line in journal.notes:
                on_note(line)
            assessor = Assessor(spec.config, spec.committee, spec.router, journal)
            spending = _spent(spec, journal)
            why = asyncio.run(_ask(spec, journal, spending, plan, assessor, on_progress, on_note))
            if why:
                on_note(f"stopped: {why}; answers so far are kept")
            if why == "interrupted":
                raise KeyboardInterrupt
            assessor.over = not why
            out = spec.folder / "preview" if preview else spec.target
            with building(out) as folder:
                report = _build(spec, assessor, plan, folder, total, task_documents, on_progress, spending)
                for line in report.warnings:
                    on_note(f"warning: {line}")
                document = manifest(spec.record, report, folder, seeds=total, plan=read_json(spec.folder / "plan.json"))
                (folder / "README.md").write_text(card(spec.config, spec.committee, document), "utf-8")
                write_json(folder / "manifest.json", document)
            return document | {"requests": journal.calls, "stopped": why or None, "dataset": str(out)}
        finally:
            journal.close()


def _plan(spec: Spec, on_note: Callable[[str], None]) -> int:
    """Writes the plan, unless it is there and made of the same; returns its number of seeds, up to the limit."""
    made_of = fingerprint(
        [
            spec.record["config"]["seeds"],
            {str(s.path): spec.record["files"].get(str(s.path)) for s in spec.config.seeds},
        ]
    )
    state = spec.folder / "plan.json"
    known = read_json(state) if state.exists() else {}
    if known.get("made_of") != made_of or (known.get("limit") or 1 << 62) < (spec.config.limit or 1 << 62):
        bad: list[dict[str, Any]] = []
        read: Counter[str] = Counter()
        domains: Counter[str] = Counter()
        seeds = read_seeds(
            spec.config.seeds, base=spec.base, limit=spec.config.limit, quarantine=bad.append, counts=read
        )
        count = write_plan(spec.folder / "seeds.jsonl", _checked(spec, seeds, domains))
        known = {
            "made_of": made_of,
            "limit": spec.config.limit,
            "seeds": count,
            "domains": dict(sorted(domains.items())),
            "read": dict(sorted(read.items())),
            "quarantined": bad,
        }
        write_json(state, known)
    if known["quarantined"]:
        first = known["quarantined"][0]
        on_note(
            f"{len(known['quarantined'])} seed rows cannot be used, the first at {first['file']}:{first['line']} "
            f"({first['reason']}); all of them are in quarantine/seeds.jsonl"
        )
    return min(int(known["seeds"]), spec.config.limit or 1 << 62)


def _answers(spec: Spec) -> int | None:
    """Answers to ask for, those of reference members included; None if a limit cuts the plan short."""
    plan = read_json(spec.folder / "plan.json")
    if spec.config.limit is not None and spec.config.limit < plan["seeds"]:
        return None
    total = 0
    for domain, count in plan["domains"].items():
        route = spec.committee.route(domain)
        assert route is not None
        total += count * ((route.samples or spec.config.samples) + bool(route.reference))
    return total


def _checked(spec: Spec, seeds: Iterable[Seed], domains: Counter[str]) -> Iterator[Seed]:
    for seed in seeds:
        spec.router.route(seed)
        domains[seed.domain] += 1
        check_verifier(seed)
        yield seed


def _spent(spec: Spec, journal: Journal) -> Spending:
    spending = Spending(spec.config.max_cost, spec.config.max_tokens)
    if spec.config.max_cost is not None or spec.config.max_tokens is not None:
        for line in journal.entries():
            if line["s"] == "ok":
                member = spec.committee.members.get(line["m"])
                spending.add(line["r"], member.price if member else None)
    return spending


async def _ask(
    spec: Spec,
    journal: Journal,
    spending: Spending,
    plan: Callable[[], Iterator[Seed]],
    assessor: Assessor,
    on_progress: OnProgress,
    on_note: Callable[[str], None],
) -> str:
    """Both rounds of asking; returns why they stopped early, or ""."""
    parties = {
        a: enlist(a, spec.committee.members[a], spec.workspace) for a in _aliases_in_use(spec.config, spec.committee)
    }
    loop = asyncio.get_running_loop()
    try:
        for phase in ("generate", "judge"):
            if phase == "judge" and not spec.config.judges:
                break
            asking = Asking(
                parties,
                journal,
                spending,
                may_fail=phase == "judge",
                on_progress=partial(_report, on_progress, phase, spending),
                on_note=on_note,
            )
            with suppress(NotImplementedError, RuntimeError, ValueError):  # signals belong to the main thread
                loop.add_signal_handler(signal.SIGTERM, asking.stop, "interrupted")
            if phase == "generate":
                chains = (chain for seed in plan() for _, chain in spec.router.chains(seed))
                expected: int | None = _answers(spec)
            else:
                chains = (chain for seed in plan() for chain in assessor.judge_chains(seed))
                expected = None
            if why := await asking.ask(chains, total=expected):
                return why
            assessor.over = True
        _check_judges(spec, {alias for alias, party in parties.items() if party.down})
        return ""
    finally:
        for party in parties.values():
            await party.engine.close()


def _report(on_progress: OnProgress, phase: str, spending: Spending, progress: Progress) -> None:
    on_progress(phase, progress, spending)


def _check_judges(spec: Spec, down: set[str]) -> None:
    for panel in spec.config.judges:
        if len(dead := down & set(panel.members)) > len(panel.members) - panel.needed:
            raise MopdctlError(
                f"judges {', '.join(sorted(dead))} are down, which leaves fewer than the {panel.needed} that make a "
                "score; nothing is lost, the same command goes on when they are back"
            )


def _build(
    spec: Spec,
    assessor: Assessor,
    plan: Callable[[], Iterator[Seed]],
    folder: Path,
    total: int,
    task_documents: TaskDocuments,
    on_progress: OnProgress,
    spending: Spending,
) -> Report:
    settings = spec.config.decontaminate

    def documents() -> Iterator[Document]:
        yield from task_documents(settings.tasks)
        for path in settings.files:
            yield from read_questions(spec.base / path)

    stage = spec.folder / "stage"
    shutil.rmtree(stage, ignore_errors=True)
    try:
        return build(
            plan(),
            assessor,
            config=spec.config,
            committee=spec.committee,
            router=spec.router,
            stage=stage,
            out=folder,
            prior_texts=(
                text
                for name in spec.config.dedup.against
                for text in read_texts(spec.workspace, spec.base, name, spec.config.dedup.on)
            ),
            documents=documents(),
            allow=allowed_texts(spec.base / path for path in settings.allow),
            on_progress=lambda done: on_progress("build", Progress(total, done), spending),
        )
    finally:
        shutil.rmtree(stage, ignore_errors=True)
