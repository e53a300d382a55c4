"""Teachers of several tiers, teachers whose answers come first, and teachers that give nothing but answers."""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill import tiers
from mopdctl.distill.run import run_distill
from mopdctl.engines.base import SampleRequest
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.files import read_jsonl, write_jsonl
from mopdctl.records import Sample
from mopdctl.runs import Workspace, read_metrics
from mopdctl.store.store import Store

pytestmark = pytest.mark.slow  # every test trains

Document = Callable[..., dict[str, Any]]
Distil = Callable[..., SimpleNamespace]
Finished = Callable[..., SimpleNamespace]

FLOAT32 = 1e-5
DOMAINS = ["arithmetic", "structured", "tools"]


class StopError(Exception):
    pass


def stop_after(steps: int) -> Callable[[int, dict[str, Any]], None]:
    def on_step(done: int, row: dict[str, Any]) -> None:
        if done == steps:
            raise StopError

    return on_step


def prompt_rows(tiny: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_jsonl(tiny / "prompts.jsonl")]


def constrained(row: dict[str, Any], **bounds: int) -> dict[str, Any]:
    reference = {"constraints": [{"kind": "letter", "letter": "e", **bounds}]}
    return row | {"verifier": "constraints", "reference": reference}


# --------------------------------------------------------------------------------------------------------------- tiers


@pytest.fixture
def tiered(tiny: Path, tmp_path: Path, teachers_document: Document) -> dict[str, Any]:
    """Arithmetic has three teachers; of its prompts a half is mastered by almost anyone, the other by nobody."""
    rows = prompt_rows(tiny)
    bounds = [{"min": 99}, {"max": 99}]
    write_jsonl(tmp_path / "prompts.jsonl", [constrained(row, **bounds[i % 2]) for i, row in enumerate(rows)])
    document = teachers_document(steps=2, batch_size=24, max_new_tokens=6) | {
        "prompts": str(tmp_path / "prompts.jsonl")
    }
    document["tiers"] = {"samples": 3, "frontier_below_confidence": None, "self_from_pass_rate": 0.9}
    document["teachers"] |= {
        "frontier": {"model": str(tiny / "models" / "tools"), "domains": ["arithmetic"], "tier": 1},
        "itself": {"model": document["student"], "kind": "self", "domains": ["arithmetic"], "tier": 3},
    }
    return document


def test_a_profile_sends_each_prompt_to_its_tier_once(
    tmp_path: Path, tiered: dict[str, Any], finished: Finished, distil: Distil, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    config, place = TeachersFile.model_validate(tiered), Workspace(tmp_path / "w")
    with pytest.raises(StopError):
        run_distill(config, place, base=tmp_path, on_step=stop_after(1), on_note=notes.append)
    routing = [row for _, row in read_jsonl(place.run("merged") / "routing.jsonl")]
    assert [row["prompt_id"] for row in routing] == [f"{d}/{i}" for d in DOMAINS for i in range(8)]
    for row in routing:
        domain, number = row["prompt_id"].split("/")
        if domain != "arithmetic":  # one teacher: nothing is asked
            assert (row["pass_rate"], row["confidence"], row["tier"], row["teacher"]) == (None, None, 2, domain)
        elif int(number) % 2 == 0:
            assert (row["pass_rate"], row["tier"], row["teacher"]) == (0.0, 1, "frontier")
        else:
            expected = (3, "itself") if row["pass_rate"] >= 0.9 else (2, "arithmetic")
            assert (row["tier"], row["teacher"]) == expected
            assert row["pass_rate"] > 0.25
    counts = Counter((row["tier"], row["teacher"]) for row in routing)
    assert counts[1, "frontier"] == 4
    assert counts[3, "itself"] >= 2
    told = {f"tier_{tier}": {t: n for (at, t), n in sorted(counts.items()) if at == tier} for tier in (1, 2, 3)}
    assert notes == [f"tiers: {told}"]

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("profiled again")

    monkeypatch.setattr(tiers, "pass_rates", never)
    run_distill(config, place, base=tmp_path)
    run = finished(place.root)
    teacher_of = {row["prompt_id"]: row["teacher"] for row in routing}
    assert all(r["teacher_id"] == teacher_of[r["prompt_id"]] for step in run.rollouts for r in step)
    shares = run.metrics[0]["policy/token_share"]
    assert shares.keys() == {teacher for _, teacher in counts}
    # the student's own copy, whatever it costs to ask it, moves nothing
    assert run.metrics[0]["distill/kl_k1_nats"]["itself"] == pytest.approx(0, abs=1e-6)
    monkeypatch.undo()
    straight = distil(tiered)
    assert straight.metrics == run.metrics
    assert all(run.weights[name].equal(weight) for name, weight in straight.weights.items())


def test_a_tier_that_gets_no_prompt_is_no_obstacle(tiered: dict[str, Any], distil: Distil) -> None:
    # with shares asked for, although one of the teachers has nothing to share
    tiered["tiers"] |= {"frontier_below_pass_rate": 0.0}
    tiered["train"] |= {"balance": {"mode": "share"}, "grad_share_every": 1, "steps": 2, "outcome_weight": 0.0}
    run = distil(tiered)
    assert "frontier" not in run.metrics[1]["balance/factor"]
    assert {r["teacher_id"] for step in run.rollouts for r in step} == {"arithmetic", "itself", "structured", "tools"}


def test_an_unsure_specialist_asks_for_the_frontier(
    tiny: Path, tmp_path: Path, tiered: dict[str, Any], finished: Finished
) -> None:
    del tiered["teachers"]["itself"]
    place = Workspace(tmp_path / "w")
    tiered["tiers"] = {
        "frontier_below_pass_rate": None,
        "frontier_below_confidence": 0.036,
        "self_from_pass_rate": None,
    }
    tiered["train"]["steps"] = 1
    run_distill(TeachersFile.model_validate(tiered), place, base=tmp_path)
    routing = {row["prompt_id"]: row for _, row in read_jsonl(place.run("merged") / "routing.jsonl")}
    asked = {r["prompt_id"]: r for r in finished(place.root).rollouts[0] if r["prompt_id"].startswith("arithmetic")}
    assert len(asked) == 8
    specialist = HFModel.load(str(tiny / "models" / "arithmetic"))
    for prompt_id, rollout in asked.items():
        (greedy,) = specialist.sample([SampleRequest("0", tuple(rollout["prompt_ids"]), 6, 0)], temperature=0)
        (scores,) = specialist.score([(rollout["prompt_ids"], greedy.token_ids)])
        sure = math.exp(fmean(scores))
        assert routing[prompt_id]["confidence"] == pytest.approx(sure, rel=1e-4)
        assert rollout["teacher_id"] == ("frontier" if sure < 0.036 else "arithmetic")
    assert {r["teacher_id"] for r in asked.values()} == {"frontier", "arithmetic"}


# ------------------------------------------------------------------------------------------------- where a run begins


def warm_up_of(run: SimpleNamespace) -> list[dict[str, Any]]:
    return read_metrics(run.folder / "warm-up")


def test_a_run_begins_where_its_warm_up_ends(tiny: Path, distil: Distil, teachers_document: Document) -> None:
    warm_up = {"steps": 4, "batch_size": 12, "samples": 4, "wrong": "keep", "learning_rate": 1e-2}
    train = {"steps": 1, "max_new_tokens": 24, "batch_size": 6}
    plain, warm = distil(teachers_document(**train)), distil(teachers_document(**train, warm_up=warm_up))
    rows = warm_up_of(warm)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    assert rows[0]["sft/loss_nats"].keys() == set(DOMAINS)
    assert not (plain.folder / "warm-up").exists()
    # the first answers are those of the student that the warm-up left, and prompts and steps are as without it
    (state,) = (warm.folder / "warm-up" / "state").glob("step-*")
    model = HFModel.load(str(tiny / "models" / "student"))
    model.model.load_state_dict(load_file(state / "model.safetensors"), strict=False)
    first = warm.rollouts[0]
    assert [r["prompt_id"] for r in first] == [r["prompt_id"] for r in plain.rollouts[0]]
    scores = model.score([(r["prompt_ids"], r["response_ids"]) for r in first])
    for rollout, row in zip(first, scores, strict=True):
        assert rollout["behavior_logprobs"] == pytest.approx(row, abs=FLOAT32)
    assert [row["step"] for row in warm.metrics] == [0]
    assert {r["policy_version"] for r in first} == {0}


@pytest.mark.slow
def test_a_warm_up_goes_on_from_the_merge(distil: Distil, teachers_document: Document) -> None:
    warm_up = {"steps": 1, "batch_size": 24, "samples": 4, "wrong": "keep"}
    train = {"steps": 1, "max_new_tokens": 24}
    alone = distil(teachers_document(**train, warm_up=warm_up))
    both = distil(teachers_document(**train, warm_up=warm_up, warm_start="merge", warm_start_scale=0.3))
    # teachers' answers are the same, and a merge of the teachers finds them likelier than the student does
    stores = [
        {s.sample_id: s.tokens.tolist() for s in Store(r.folder / "warm-up" / "answers").scan()} for r in (alone, both)
    ]
    assert stores[0] == stores[1]
    assert warm_up_of(both)[0]["train/loss"] < warm_up_of(alone)[0]["train/loss"] - 0.01


# --------------------------------------------------------------------------------------------------------- black boxes


def played(document: dict[str, Any], folder: Path) -> SimpleNamespace:
    """Metrics without times, and the samples of each step: those of a discriminator have no teacher's scores."""
    config, place = TeachersFile.model_validate(document), Workspace(folder)
    run_distill(config, place, base=folder)
    steps: dict[int, list[Sample]] = {}
    for sample in Store(place.rollouts(config.name)).scan():
        steps.setdefault(sample.policy_version_min, []).append(sample)
    rows = [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in read_metrics(place.run(config.name))]
    return SimpleNamespace(metrics=rows, samples=[steps.get(i, []) for i in range(len(rows))])


def with_black_box(document: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """The teacher of structured answers is a black box."""
    document["teachers"]["structured"] = {"domains": ["structured"], **settings}
    return document


@pytest.fixture(scope="module")
def said(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a black box answered to each prompt of structured answers."""
    path = tmp_path_factory.mktemp("said") / "answers.jsonl"
    write_jsonl(path, [{"prompt_id": f"structured/{i}", "answer": f"say {i}"} for i in range(8)])
    return str(path)


@pytest.mark.parametrize("objective", ["exact", pytest.param("sampled", marks=pytest.mark.slow)])
def test_answers_of_a_file_train_beside_teachers_that_score_and_do_not_dilute_them(
    said: str, distil: Distil, teachers_document: Document, objective: str
) -> None:
    # prime-rl: mixed components change each other's scale
    train = {"objective": objective, "learning_rate": 3e-3, "batch_size": 24, "steps": 4, "grad_share_every": 1}
    run = distil(with_black_box(teachers_document(**train), gives="answers", answers=said, wrong_answers="keep"))
    first = run.metrics[0]
    # the student is not asked for what it imitates
    assert {r["teacher_id"] for step in run.rollouts for r in step} == {"arithmetic", "tools"}
    nll = [row["blackbox/nll_nats"]["structured"] for row in run.metrics]
    assert nll == sorted(nll, reverse=True)
    assert nll[-1] < nll[0] - 0.3
    tokens = {d: sum(len(r["response_ids"]) for r in run.rollouts[0] if r["teacher_id"] == d) for d in DOMAINS}
    kl = first["distill/kl_k1_nats" if objective == "sampled" else "distill/kl_exact_nats"]
    own = sum(kl[d] * tokens[d] for d in ("arithmetic", "tools")) / sum(tokens.values())
    assert first["train/loss"] == pytest.approx(own + nll[0], abs=1e-4)
    assert run.times[0]["perf/teacher_tokens"].keys() == {"arithmetic", "tools"}
    assert run.card["teachers"].keys() == set(DOMAINS)


def test_a_model_may_be_known_by_its_answers_alone(
    tiny: Path, distil: Distil, teachers_document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = teachers_document(steps=3, batch_size=24, max_new_tokens=40, learning_rate=3e-3)
    model = str(tiny / "models" / "structured")
    run = distil(with_black_box(document, gives="answers", model=model, wrong_answers="keep", without_answer="drop"))
    kept = {s.sample_id: s for s in Store(run.folder / "blackbox" / "structured").scan()}
    assert {s.teacher_id for s in kept.values()} == {"structured"}
    assert len(kept) == 8
    nll = [row["blackbox/nll_nats"]["structured"] for row in run.metrics]
    assert nll[-1] < nll[0]
    # nothing but what it wrote is used: of its log-probabilities there is no trace
    assert all("structured" not in row["distill/kl_k1_nats"] for row in run.metrics)
    assert all("structured" not in row["perf/teacher_tokens"] for row in run.times)


def test_a_discriminator_pays_beside_teachers_that_score(
    said: str, tmp_path: Path, teachers_document: Document
) -> None:
    document = teachers_document(steps=4, batch_size=12, samples_per_prompt=2, grad_share_every=1)
    settings = {"learning_rate": 1e-3, "warm_up_steps": 1}
    box = {"gives": "discriminator", "answers": said, "wrong_answers": "keep", "discriminator": settings}
    run = played(with_black_box(document, **box), tmp_path)
    for samples in run.samples:
        assert {s.teacher_id for s in samples} == set(DOMAINS)
        assert all((s.teacher_logprobs is None) == (s.teacher_id == "structured") for s in samples)
    warm, *paid = run.metrics
    assert warm["blackbox/nll_nats"].keys() == {"structured"}
    for row in paid:
        assert "blackbox/nll_nats" not in row
        assert row["policy/kept_fraction"]["structured"] == 1.0
        assert row["policy/grad_share"]["structured"] > 0
        assert row["distill/kl_k1_nats"].keys() == {"arithmetic", "tools"}
    margin = [row["blackbox/margin"]["structured"] for row in run.metrics]
    assert margin[0] == pytest.approx(0, abs=1e-6)  # what has learnt nothing tells nothing apart
    assert margin[-1] > 0.01


def test_all_kinds_of_teachers_teach_in_one_run_with_rewards_a_balance_and_an_anchor(
    tiny: Path, said: str, tmp_path: Path, teachers_document: Document
) -> None:
    write_jsonl(tmp_path / "prompts.jsonl", [constrained(row, min=1) for row in prompt_rows(tiny)])
    write_jsonl(tmp_path / "tools.jsonl", [{"prompt_id": f"tools/{i}", "answer": "be"} for i in range(8)])
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    write_jsonl(tmp_path / "sft.jsonl", [{"messages": talk}])
    document = teachers_document(
        steps=6,
        batch_size=2,
        samples_per_prompt=2,
        outcome_weight=0.5,
        grad_share_every=1,
        balance={"mode": "share"},
        anchor={"sft_weight": 0.1, "sft_data": "sft.jsonl", "sft_batch_size": 1},
    )
    document["prompts"] = "prompts.jsonl"
    with_black_box(document, gives="answers", answers=said, wrong_answers="keep")
    document["teachers"]["tools"] = {"domains": ["tools"], "gives": "discriminator", "answers": "tools.jsonl"}
    run = played(document, tmp_path)
    drawn = [sorted({s.teacher_id for s in samples}) for samples in run.samples]
    # With two prompts a step, teachers come and go, and what a step has is enough.
    assert {"arithmetic", "tools"} == {alias for found in drawn for alias in found}
    assert any("arithmetic" not in found for found in drawn)
    for row, found in zip(run.metrics, drawn, strict=True):
        assert row["sft/loss_nats"].keys() == {"sft_anchor"}
        assert sorted(row.get("distill/kl_k1_nats", {})) == [alias for alias in found if alias == "arithmetic"]
        assert sorted(row.get("blackbox/margin", {})) == [alias for alias in found if alias == "tools"]
        assert row["balance/factor"].keys() == {"arithmetic"}  # no factor reaches a black box
        assert sum(row["policy/grad_share"].values()) == pytest.approx(1)
    assert {alias for row in run.metrics for alias in row.get("blackbox/nll_nats", {})} == {"structured"}


def test_a_black_box_without_an_answer_is_refused_before_the_first_step(
    said: str, tmp_path: Path, teachers_document: Document, distil: Distil
) -> None:
    write_jsonl(tmp_path / "few.jsonl", [row for _, row in read_jsonl(Path(said))][:5])
    document = with_black_box(
        teachers_document(), gives="answers", answers=str(tmp_path / "few.jsonl"), wrong_answers="keep"
    )
    with pytest.raises(InputError, match=r"no usable answer to prompt 'structured/5', nor to 2 others of 8"):
        distil(document, tmp_path / "w")
    assert not (tmp_path / "w").exists()
    document["teachers"]["structured"]["without_answer"] = "drop"
    assert distil(document).metrics[-1]["step"] == 1
