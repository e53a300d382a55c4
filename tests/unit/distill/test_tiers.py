"""Tiers: the rule, what it needs to know, the profile before the first step, and the file it is kept in."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mopdctl.config.tiers import TiersConfig
from mopdctl.distill import tiers
from mopdctl.distill.tiers import (
    FRONTIER,
    SELF,
    SPECIALIST,
    Routed,
    assign,
    by_tier,
    check_tiers,
    confidences,
    pass_rates,
    read_routing,
    route_by_tiers,
    tier_counts,
)
from mopdctl.engines.base import SampleRequest, sample
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.files import read_jsonl
from mopdctl.records import Prompt
from mopdctl.rollouts.book import AnswerSettings, PromptBook
from mopdctl.rollouts.jobs import make_job
from mopdctl.train import distributed
from mopdctl.verifiers import Attempt, Verdict, VerdictState

ALL = {FRONTIER: "big", SPECIALIST: "expert", SELF: "self"}
TWO = {FRONTIER: "big", SPECIALIST: "expert"}


def settings(**changes: Any) -> TiersConfig:
    return TiersConfig.model_validate(
        {"frontier_below_pass_rate": 0.25, "frontier_below_confidence": 0.5, "self_from_pass_rate": 0.75} | changes
    )


# ------------------------------------------------------------------------------------------------------------ the rule


@pytest.mark.parametrize(
    ("serving", "pass_rate", "confidence", "want"),
    [
        (ALL, 0.0, 0.9, FRONTIER),  # too hard for the student
        (ALL, 0.24, 0.9, FRONTIER),
        (ALL, 0.25, 0.9, SPECIALIST),  # "below" leaves the threshold itself out
        (ALL, 0.5, 0.49, FRONTIER),  # the specialist is unsure
        (ALL, 0.5, 0.5, SPECIALIST),
        (ALL, 0.74, 0.9, SPECIALIST),
        (ALL, 0.75, 0.9, SELF),  # "from" takes it in
        (ALL, 1.0, 0.1, SELF),  # mastered needs no frontier teacher
        (TWO, 1.0, 0.9, SPECIALIST),
        (TWO, 1.0, 0.1, FRONTIER),
        (TWO, 0.0, 0.1, FRONTIER),
        ({SPECIALIST: "expert", SELF: "self"}, 0.0, None, SPECIALIST),
        ({SPECIALIST: "expert", SELF: "self"}, 1.0, None, SELF),
        ({SPECIALIST: "expert"}, None, None, SPECIALIST),
        ({FRONTIER: "big"}, None, None, FRONTIER),
        ({SELF: "self"}, 0.0, 0.0, SELF),
    ],
)
def test_who_serves(serving: Mapping[int, str], pass_rate: Any, confidence: Any, want: int) -> None:
    assert assign(serving, pass_rate, confidence, settings(), place="p:1") == want


def test_a_threshold_of_null_does_not_ask() -> None:
    by_confidence = settings(frontier_below_pass_rate=None, self_from_pass_rate=None)
    assert assign(ALL, None, 0.4, by_confidence, place="p:1") == FRONTIER
    assert assign(ALL, None, 0.6, by_confidence, place="p:1") == SPECIALIST
    by_pass_rate = settings(frontier_below_confidence=None)
    assert [assign(ALL, p, None, by_pass_rate, place="p:1") for p in (0.1, 0.5, 0.9)] == [FRONTIER, SPECIALIST, SELF]


def test_a_number_that_is_unknown_and_asked_for_is_missed() -> None:
    with pytest.raises(InputError) as caught:
        assign(TWO, None, 0.9, settings(), place="p.jsonl:3")
    assert str(caught.value) == (
        "p.jsonl:3: its pass rate is unknown (no verifier, or no answer could be checked), and "
        "tiers.frontier_below_pass_rate needs it"
    )
    with pytest.raises(InputError, match=r"its pass rate is unknown .* and tiers\.self_from_pass_rate needs it"):
        assign({SPECIALIST: "expert", SELF: "self"}, None, None, settings(), place="p.jsonl:3")
    with pytest.raises(InputError, match=r"the confidence of tier 2 is unknown, and tiers\.frontier_below_confidence"):
        assign(TWO, 0.9, None, settings(), place="p.jsonl:3")


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0.01, 1), st.floats(0, 1))
def test_the_frontier_gets_only_what_is_too_hard_or_unsure_and_self_only_what_is_mastered(
    pass_rate: float, confidence: float, below: float, since: float, sure: float
) -> None:
    below, since = min(below, since), max(below, since)
    config = settings(frontier_below_pass_rate=below, frontier_below_confidence=sure, self_from_pass_rate=since)
    tier = assign(ALL, pass_rate, confidence, config, place="p:1")
    assert (tier == SELF) == (pass_rate >= since)
    assert (tier == FRONTIER) == (pass_rate < since and (pass_rate < below or confidence < sure))


def test_bands_that_overlap_are_refused() -> None:
    with pytest.raises(ValidationError, match="too hard and mastered at once"):
        settings(frontier_below_pass_rate=0.8)
    settings(frontier_below_pass_rate=0.75)
    settings(frontier_below_pass_rate=0.9, self_from_pass_rate=None)


# ------------------------------------------------------------------------------------------------- teachers of a domain

TIERS = {"big": 1, "big2": 1, "expert": 2, "expert2": 2, "self": 3}


def test_teachers_of_a_domain_differ_in_tier() -> None:
    assert by_tier(["self", "big", "expert"], TIERS, place="p:1") == ALL
    assert by_tier(["big"], TIERS, place="p:1") == {FRONTIER: "big"}
    for order in (["expert2", "expert"], ["expert", "expert2"]):
        with pytest.raises(InputError) as caught:
            by_tier(order, TIERS, place="p.jsonl:1: domain 'math'")
        assert str(caught.value) == (
            "p.jsonl:1: domain 'math': teachers expert and expert2 both serve it in tier 2; take its domain from one "
            "or give them different tiers"
        )
    with pytest.raises(InputError, match="teachers big and self serve it, but none in tier 2"):
        by_tier(["self", "big"], TIERS, place="p:1")


def prompt(number: int, **changes: Any) -> Prompt:
    fields: dict[str, Any] = {"verifier": "exact_match", "reference": {"answer": "x"}, "place": f"p.jsonl:{number}"}
    return Prompt(f"p{number}", ({"role": "user", "content": f"{number}"},), None, {}, **fields | changes)


def test_what_can_be_known_before_a_model_is_loaded_is_checked_then() -> None:
    unchecked = prompt(2, verifier=None)
    check_tiers([prompt(1), unchecked], [ALL, {SPECIALIST: "expert"}], settings())
    check_tiers([unchecked], [TWO], settings(frontier_below_pass_rate=None))
    with pytest.raises(InputError) as caught:
        check_tiers([prompt(1), unchecked], [ALL, TWO], settings())
    assert str(caught.value) == (
        "p.jsonl:2: names no verifier, and tiers.frontier_below_pass_rate needs the student's pass rate; give it one "
        "or set the threshold to null"
    )
    with pytest.raises(InputError, match="teacher 'big': tier 1 gets no prompt, for both its thresholds are null"):
        check_tiers([prompt(1)], [TWO], settings(frontier_below_pass_rate=None, frontier_below_confidence=None))
    with pytest.raises(InputError, match=r"teacher 'self': tier 3 gets no prompt, for tiers\.self_from_pass_rate is"):
        check_tiers([prompt(1)], [ALL], settings(self_from_pass_rate=None))


# --------------------------------------------------------------------------------------------------------- the profile


class Earning:
    """A pool: prompt n is passed n times out of every four; what `broken` names could not be checked."""

    def __init__(self, broken: Sequence[int] = ()) -> None:
        self.asked: Counter[int] = Counter()
        self._broken = broken

    def check(self, asked: list[tuple[str, Attempt]]) -> list[Verdict]:
        found = []
        for name, attempt in asked:
            number = int(attempt.messages[0]["content"])
            if number in self._broken:
                found.append(Verdict(VerdictState.INFRA_ERROR, None, name, 1))
            elif self.asked[number] % 4 < number:
                found.append(Verdict(VerdictState.OK, 1.0, name, 1))
            else:
                found.append(Verdict(VerdictState.PARSE_ERROR, None, name, 1))
            self.asked[number] += 1
        return found


@pytest.fixture(scope="module")
def models(tiny: Path) -> dict[str, HFModel]:
    return {name: HFModel.load(str(tiny / "models" / name)) for name in ("student", "arithmetic")}


@pytest.fixture(scope="module")
def book(models: dict[str, HFModel]) -> PromptBook:
    return PromptBook(models["student"], [prompt(n) for n in range(5)], lambda p: AnswerSettings(5))


def test_the_pass_rate_is_the_mean_reward_of_the_answers_that_could_be_checked(
    models: dict[str, HFModel], book: PromptBook
) -> None:
    pool = Earning(broken=[2])
    found = pass_rates(book, [3, 0, 2], 4, models["student"], pool, tools=None, temperature=1.0, seed=0)
    assert found == {3: 0.75, 0: 0.0, 2: None}
    assert pool.asked == {3: 4, 0: 4, 2: 4}


def test_confidence_is_the_geometric_mean_probability_of_the_teachers_own_greedy_answer(
    models: dict[str, HFModel], book: PromptBook
) -> None:
    teacher = models["arithmetic"]
    found = confidences(book, [0, 4], teacher, tools=None, seed=0)
    wide = type(teacher.model)(teacher.model.config).eval()
    wide.load_state_dict(teacher.model.state_dict())
    wide = wide.double()
    for row in (0, 4):
        prompt_ids = book.token_ids(row)
        (greedy,) = sample(teacher, [SampleRequest("x", prompt_ids, 5, 1)], temperature=0)
        with torch.no_grad():
            logits = wide(torch.tensor([[*prompt_ids, *greedy.token_ids]])).logits[0]
        probabilities = torch.softmax(logits, -1)
        chosen = [float(probabilities[len(prompt_ids) + t - 1, token]) for t, token in enumerate(greedy.token_ids)]
        assert found[row] == pytest.approx(math.prod(chosen) ** (1 / len(chosen)), rel=1e-4)
        assert 0.0 < (found[row] or 0) < 1.0
    assert found[0] != found[4]


def run(
    path: Path, book: PromptBook, serving: Sequence[Mapping[int, str]], config: TiersConfig, models: Any, pool: Earning
) -> tuple[list[Routed], list[str]]:
    """The routing, and whom it asked to answer, in order."""
    asked = []

    def resident(alias: str) -> AbstractContextManager[HFModel]:
        asked.append(alias)
        return nullcontext(models["arithmetic"])

    found = route_by_tiers(
        path, book, serving, config, models["student"], resident, pool, tools=None, temperature=1.0, seed=0
    )
    return found, asked


SERVING = [ALL, ALL, TWO, ALL, {SPECIALIST: "expert"}]


def test_every_prompt_has_a_line_and_nobody_is_asked_what_no_threshold_needs(
    models: dict[str, HFModel], book: PromptBook, tmp_path: Path
) -> None:
    pool = Earning()
    found, asked = run(tmp_path / "routing.jsonl", book, SERVING, settings(samples=4), models, pool)
    sure = confidences(book, [0, 1, 2, 3], models["arithmetic"], tools=None, seed=0)
    assert [(r.prompt_id, r.pass_rate) for r in found] == [(f"p{n}", n / 4) for n in range(4)] + [("p4", None)]
    assert [r.confidence for r in found] == [*(sure[n] for n in range(4)), None]
    want = [assign(s, n / 4, sure.get(n), settings(), place="") for n, s in enumerate(SERVING)]
    assert [r.tier for r in found] == want
    assert (want[0], want[3], want[4]) == (FRONTIER, SELF, SPECIALIST)
    assert [r.teacher for r in found] == [s[t] for s, t in zip(SERVING, want, strict=True)]
    assert asked == ["expert"]
    assert pool.asked == dict.fromkeys(range(4), 4)
    rows = [row for _, row in read_jsonl(tmp_path / "routing.jsonl")]
    assert rows[0] == {
        "prompt_id": "p0",
        "pass_rate": 0.0,
        "confidence": sure[0],
        "tier": 1,
        "teacher": "big",
    }
    assert sum(n for counts in tier_counts(found).values() for n in counts.values()) == 5
    assert tier_counts(found)["tier_3"] == {"self": 1}


def test_confidence_alone_can_split_a_domain(models: dict[str, HFModel], book: PromptBook, tmp_path: Path) -> None:
    sure = confidences(book, range(5), models["arithmetic"], tools=None, seed=0)
    ranked = sorted(sure, key=lambda n: sure[n] or 0)
    config = settings(
        frontier_below_pass_rate=None, self_from_pass_rate=None, frontier_below_confidence=sure[ranked[2]]
    )
    pool = Earning()
    found, _ = run(tmp_path / "routing.jsonl", book, [TWO] * 5, config, models, pool)
    assert [n for n, r in enumerate(found) if r.teacher == "big"] == sorted(ranked[:2])
    assert not pool.asked


def test_a_run_that_goes_on_reads_what_was_found_and_asks_nobody(
    models: dict[str, HFModel], book: PromptBook, tmp_path: Path
) -> None:
    path = tmp_path / "routing.jsonl"
    first, _ = run(path, book, SERVING, settings(), models, Earning())
    text = path.read_bytes()
    pool = Earning()
    again, asked = run(path, book, SERVING, settings(), models, pool)
    assert again == first
    assert (asked, pool.asked, path.read_bytes()) == ([], {}, text)


def test_a_profile_that_fails_leaves_no_file(models: dict[str, HFModel], book: PromptBook, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"p\.jsonl:1: its pass rate is unknown"):
        run(tmp_path / "routing.jsonl", book, SERVING, settings(), models, Earning(broken=[1]))
    assert list(tmp_path.iterdir()) == []


def test_profile_answers_have_streams_of_their_own(models: dict[str, HFModel], book: PromptBook) -> None:
    ((_, answer),) = tiers._answers(book, [2], "tiers", 1, models["student"], tools=None, temperature=1.0, seed=0)
    training = make_job(
        book.prompts[2],
        "0/0",
        seed=0,
        group_id="",
        generation_index=0,
        domain="",
        teacher_id="",
        prompt_ids=book.token_ids(2),
        max_new_tokens=5,
    )
    (trained,) = sample(models["student"], [training.request()], temperature=1.0)
    assert answer.sample_id != training.sample_id
    assert answer.response_ids.tolist() != list(trained.token_ids)


def alone(to: list[Any], own: Any) -> list[Any]:
    """What is gathered where nobody else is; kept in `to`."""
    to.append(own)
    return [own]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_profile_and_come_to_the_same_numbers(
    ranks: int, models: dict[str, HFModel], book: PromptBook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = run(tmp_path / "one.jsonl", book, SERVING, settings(), models, Earning())
    parts: list[list[Any]] = []
    asked: list[Counter[int]] = []
    for rank in range(ranks):
        gathered: list[Any] = []
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(distributed, "world_size", lambda: ranks)
        monkeypatch.setattr(distributed, "gather_objects", partial(alone, gathered))
        pool = Earning()
        with pytest.raises(InputError):  # what the other ranks have is missing
            run(tmp_path / "two.jsonl", book, SERVING, settings(), models, pool)
        parts.append(gathered)
        asked.append(pool.asked)
    assert sum((part.total() for part in asked), 0) == 16
    turn = iter(zip(*parts, strict=True))
    monkeypatch.setattr(distributed, "gather_objects", lambda own: list(next(turn)))
    monkeypatch.setattr(distributed, "rank", lambda: 0)
    found, _ = run(tmp_path / "two.jsonl", book, SERVING, settings(), models, Earning())
    assert [(r.prompt_id, r.pass_rate, r.tier, r.teacher) for r in found] == [
        (r.prompt_id, r.pass_rate, r.tier, r.teacher) for r in whole
    ]
    for one, other in zip(found[:4], whole[:4], strict=True):
        assert one.confidence == pytest.approx(other.confidence, rel=1e-5)  # batches round in another order


# ------------------------------------------------------------------------------------------------------------ the file


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_id": "other"}, "routes other prompts than the run has"),
        ({"teacher": "stranger"}, "'stranger' does not serve prompt 'p0' in tier 1"),
        ({"tier": 3}, "'big' does not serve prompt 'p0' in tier 3"),
        ({"note": "mine"}, "routing.jsonl:1: not a line of a routing"),
    ],
)
def test_a_file_that_is_not_this_runs_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "routing.jsonl"
    line = {"prompt_id": "p0", "pass_rate": 0.0, "confidence": None, "tier": 1, "teacher": "big"}
    path.write_text(json.dumps(line) + "\n", "utf-8")
    assert read_routing(path, [prompt(0)], [ALL]) == [Routed("p0", 0.0, None, 1, "big")]
    path.write_text(json.dumps(line | change) + "\n", "utf-8")
    with pytest.raises(InputError, match="remove the file to profile again") as caught:
        read_routing(path, [prompt(0)], [ALL])
    assert message in str(caught.value)
