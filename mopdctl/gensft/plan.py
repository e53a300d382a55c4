"""The plan of a run: its seeds, read once, checked, and written down, so that every later run sees the same."""

import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopdctl.errors import InputError
from mopdctl.files import file_digest, fingerprint, write_json
from mopdctl.gensft.assess import filter_settings
from mopdctl.gensft.filters import RULES, FilterSettings
from mopdctl.gensft.records import Seed
from mopdctl.gensft.seeds import read_plan, read_seeds, write_plan
from mopdctl.gensft.spec import Spec
from mopdctl.gensft.verify import check_verifier

PROMPT_RULES = ("control_tokens", "role_order", "tool_pairing", "tool_schema", "license")
"""Rules that a prompt fails whatever is answered: nobody needs to be paid to find out."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The seeds of a run."""

    path: Path
    seeds: int
    domains: dict[str, int]
    """Domain to seeds."""
    read: dict[str, int]
    """What `read_seeds` counted."""
    quarantined: list[dict[str, Any]]
    """Rows that are no seeds, with place and reason."""

    def __iter__(self) -> Iterator[Seed]:
        """The seeds, read one by one."""
        return read_plan(self.path)

    def answers(self, spec: Spec) -> int:
        """Answers to ask for, those of reference members included."""
        total = 0
        for domain, count in self.domains.items():
            route = spec.committee.route(domain)
            assert route is not None
            total += count * ((route.samples or spec.config.samples) + bool(route.reference))
        return total


def usable_seeds(spec: Spec, quarantine: Callable[[dict[str, Any]], None], counts: Counter[str]) -> Iterator[Seed]:
    """The seeds of all sources; those that no answer could make a row of go to quarantine.

    Raises InputError for a seed without a route or with an unknown verifier: the configuration is at fault there.
    """
    settings = filter_settings(spec.config.filter)
    found = read_seeds(spec.config.seeds, base=spec.base, limit=spec.config.limit, quarantine=quarantine, counts=counts)
    for seed in found:
        spec.router.route(seed)
        check_verifier(seed)
        if why := _hopeless(seed, settings):
            quarantine({"file": seed.place, "line": None, "byte_offset": None, "reason": why, "text": _beginning(seed)})
        else:
            yield seed


def _hopeless(seed: Seed, settings: FilterSettings) -> str | None:
    row = {
        "messages": [*seed.messages, {"role": "assistant", "content": "An answer."}],
        "tools": list(seed.tools) if seed.tools else None,
        "license": seed.license,
    }
    for name in PROMPT_RULES:
        if name not in settings.off and (reason := RULES[name].check(row, settings)):
            return f"{name}: {reason}"
    return None


def _beginning(seed: Seed) -> str:
    return json.dumps(list(seed.messages), ensure_ascii=False)[:500]


def make_plan(spec: Spec, on_note: Callable[[str], None], *, name: str = "seeds") -> Plan:
    """Writes the plan into the run's folder, as `<name>.jsonl`, unless it is there, whole, and made of the same.

    Raises InputError for a domain that no route leads to, or that judges or selection name and nothing else knows.
    """
    path, state = spec.folder / f"{name}.jsonl", spec.folder / f"{name}.plan.json"
    config = spec.record["config"]
    made_of = fingerprint([config["seeds"], config["limit"], config["filter"], spec.record["seeds"]])
    known = _known(state)
    if known.get("made_of") != made_of or not path.is_file() or file_digest(path) != known.get("digest"):
        for left_over in spec.folder.glob(f".{name}.jsonl.*"):
            left_over.unlink()
        bad: list[dict[str, Any]] = []
        counts, domains = Counter[str](), Counter[str]()
        seeds = write_plan(path, _counted(usable_seeds(spec, bad.append, counts), domains))
        known = {
            "made_of": made_of,
            "digest": file_digest(path),
            "seeds": seeds,
            "domains": dict(sorted(domains.items())),
            "read": dict(sorted(counts.items())),
            "quarantined": bad,
        }
        write_json(state, known | {"check": fingerprint(known)})
    if known["quarantined"]:
        first = known["quarantined"][0]
        place = first["file"] if first["line"] is None else f"{first['file']}:{first['line']}"
        on_note(
            f"{len(known['quarantined'])} seed rows cannot be used, the first at {place} ({first['reason']}); all of "
            "them are in quarantine/seeds.jsonl"
        )
    _check_domains(spec, known["domains"])
    return Plan(path, known["seeds"], known["domains"], known["read"], known["quarantined"])


def _check_domains(spec: Spec, domains: Mapping[str, int]) -> None:
    for domain in domains:
        if spec.committee.route(domain) is None:
            raise InputError(
                f"domain {domain!r} has no route any more; add one to {spec.config.committee}, or `default`"
            )
    known = domains.keys() | spec.committee.routes.keys()
    for what, entries in (("judges", spec.config.judges), ("select", spec.config.select)):
        for domain in {domain for entry in entries for domain in entry.domains} - known:
            near = difflib.get_close_matches(domain, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known domains: {', '.join(sorted(known))}"
            raise InputError(f"{what}: no seed and no route has the domain {domain!r}; {hint}")


def _known(state: Path) -> dict[str, Any]:
    """What an earlier run wrote down; empty if there is nothing or it is damaged."""
    try:
        found = json.loads(state.read_bytes())
    except (OSError, ValueError):
        return {}
    check = found.pop("check", None) if isinstance(found, dict) else None
    return found if check is not None and check == fingerprint(found) else {}


def _counted(seeds: Iterable[Seed], domains: Counter[str]) -> Iterator[Seed]:
    for seed in seeds:
        domains[seed.domain] += 1
        yield seed
