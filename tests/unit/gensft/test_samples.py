import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mopdctl.config.base import load_config
from mopdctl.config.committee import CommitteeFile
from mopdctl.config.gensft import GenConfig
from mopdctl.config.sft import SftConfig
from mopdctl.gensft.attributes import expected
from mopdctl.gensft.decontaminate import scan
from mopdctl.gensft.question_index import build_index
from mopdctl.gensft.question_parts import Document
from mopdctl.gensft.records import Seed
from mopdctl.gensft.seeds import read_seeds

SHIPPED = Path(__file__).parent.parent.parent.parent / "sample_data"
FOLDER = SHIPPED / "gensft"
FORMATS = ("JSON", "YAML", "XML", "TOML", "CSV")
REQUEST_WORDS = re.compile("|".join(rf"\b{name}\b" for name in FORMATS))


@pytest.fixture(scope="module")
def config() -> GenConfig:
    return load_config(GenConfig, FOLDER / "gen.yaml")


@pytest.fixture(scope="module")
def committee(config: GenConfig) -> CommitteeFile:
    return load_config(CommitteeFile, FOLDER / config.committee)


@pytest.fixture(scope="module")
def found(config: GenConfig) -> tuple[list[Seed], list[dict[str, Any]], Counter[str]]:
    bad: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    seeds = list(read_seeds(config.seeds, base=FOLDER, limit=None, quarantine=bad.append, counts=counts))
    return seeds, bad, counts


def test_the_samples_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 60_000


def test_seeds_and_quarantine_have_the_sizes_that_the_comments_promise(
    found: tuple[list[Seed], list[dict[str, Any]], Counter[str]],
) -> None:
    seeds, bad, counts = found
    assert Counter(seed.domain for seed in seeds) == {"math": 24, "chat": 22, "tools": 14, "structured": 40}
    assert [(entry["line"], entry["reason"]) for entry in bad] == [
        (41, "not JSON (Unterminated string starting at column 47)")
    ]
    assert counts["answers_cut"] == 1
    assert counts["uneven_roles"] == counts["arguments_not_an_object"] == 0
    assert (FOLDER / "seeds.jsonl").read_bytes().count(b"\r\n") == 1
    assert len({json.dumps(seed.messages) for seed in seeds}) == len(seeds), "no prompt stands there twice"


def test_every_seed_says_where_it_comes_from_and_how_hard_it_is(
    found: tuple[list[Seed], list[dict[str, Any]], Counter[str]],
) -> None:
    for seed in found[0]:
        assert seed.license == "cc0-1.0", seed.place
        assert seed.source not in ("seeds.jsonl", "attributes"), seed.place
        assert seed.difficulty is not None, seed.place
        assert (seed.tools is not None) == (seed.domain == "tools"), seed.place


def test_every_domain_has_a_route_and_every_tier_gets_seeds(
    committee: CommitteeFile, found: tuple[list[Seed], list[dict[str, Any]], Counter[str]]
) -> None:
    assert {seed.domain for seed in found[0]} == committee.routes.keys()
    reached = {(seed.domain, committee.routes[seed.domain].tier(seed.difficulty)[0]) for seed in found[0]}
    assert reached == {(domain, tier) for domain, route in committee.routes.items() for tier in route.tiers or [""]}


def test_judges_are_members_and_judge_chat_only(config: GenConfig, committee: CommitteeFile) -> None:
    panel = config.panel("chat")
    assert panel is not None
    assert set(panel.members) <= committee.members.keys()
    assert config.panel("math") is None
    assert {domain: config.selection(domain).strategy for domain in committee.routes} == {
        "math": "majority",
        "chat": "best",
        "tools": "best",
        "structured": "best",
    }


def test_the_structured_set_has_every_format_in_its_quota_and_names_no_other(
    config: GenConfig, found: tuple[list[Seed], list[dict[str, Any]], Counter[str]]
) -> None:
    attributes = next(source.attributes for source in config.seeds if source.attributes)
    made = [seed for seed in found[0] if seed.domain == "structured"]
    for axis, counts in expected(attributes).items():
        assert Counter(seed.extra[axis] for seed in made if seed.extra) == counts
    assert expected(attributes)["format"] == dict.fromkeys(FORMATS, 8)
    for seed in made:
        assert seed.extra is not None
        assert REQUEST_WORDS.findall(seed.messages[0]["content"]) == [seed.extra["format"]]


def test_the_schemas_are_eight_valid_ones_and_stand_in_the_prompts_as_they_are(
    config: GenConfig, found: tuple[list[Seed], list[dict[str, Any]], Counter[str]]
) -> None:
    attributes = next(source.attributes for source in config.seeds if source.attributes)
    schemas = {name: record["schema"] for name, record in attributes.tables["record"].items()}
    assert len(schemas) == 8
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert set(schema["required"]) < set(schema["properties"])
    for seed in found[0]:
        if seed.domain == "structured":
            assert seed.extra is not None
            (block,) = re.findall(r"```json\n(.*?)\n```", seed.messages[0]["content"], re.DOTALL)
            assert json.loads(block) == schemas[seed.extra["record"]]


def test_exactly_one_benchmark_question_stands_among_the_seeds(
    config: GenConfig, found: tuple[list[Seed], list[dict[str, Any]], Counter[str]]
) -> None:
    (name,) = config.decontaminate.files
    questions = [json.loads(line) for line in (FOLDER / name).read_text("utf-8").splitlines()]
    assert len(questions) == 5
    index = build_index([Document(str(name), q["id"], q["question"]) for q in questions], allow=[])
    rows = [(at, seed.seed_id, [seed.messages[-1]["content"]]) for at, seed in enumerate(found[0])]
    assert [hit.document_id for hit in scan(rows, index)] == ["bakery"]


# -------------------------------------------------------------------------------------------- the published committee

DOMAINS = "efficiency safety search terminal swe math proof science chat code cuda rtl multilingual tool_use"


def test_the_published_committee_routes_every_domain_and_says_how_it_was_selected() -> None:
    committee = load_config(CommitteeFile, SHIPPED / "committee.nemotron-3-ultra.yaml")
    assert set(committee.routes) == set(DOMAINS.split())
    assert all(route.note for route in committee.routes.values())
    assert [name for name, route in committee.routes.items() if route.loss_on == "last_assistant"] == ["chat"]
    assert committee.routes["math"].members == {"deepseek-v3.2": 1.8, "deepseek-v3.2-speciale": 1.9}
    assert len({member.base_url for member in committee.members.values()}) == len(committee.members) == 15
    licenses = {alias: member.license for alias, member in committee.members.items()}
    assert {licenses[alias] for alias in ("minimax-m2.1", "minimax-m2.5", "riva-translate-4b")} == {None}
    assert {license_name for alias, license_name in licenses.items() if alias.startswith(("deepseek", "glm"))} == {
        "mit"
    }


def test_the_two_stage_configuration_loads_and_its_stages_differ() -> None:
    config = load_config(SftConfig, FOLDER / "sft.yaml")
    first, second = config.stages
    assert config.train.steps == first.steps + second.steps
    assert first.max_length != second.max_length
    assert first.learning_rate != second.learning_rate
    assert second.data
