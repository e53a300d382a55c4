"""The experiment on objectives: its arithmetic on made-up tables, its scheduling, and one small run that is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopdctl.distill.overlap.advice import Support, advise, overall
from mopdctl.errors import InputError
from mopdctl.runs import Workspace
from mopdctl.world.family.config import grpo_of, teachers_of
from mopdctl.world.family.document import steps_to_teacher, summarize_advice, to_document
from mopdctl.world.family.fit import Cell, Thresholds, arm_for, fit
from mopdctl.world.family.plan import ADVISED, ARMS, BASE, SETTINGS, full_scale, quick_scale
from mopdctl.world.family.pool import Key, is_done, mark_path, priorities, run_all, run_marked
from mopdctl.world.family.run import main, workspace_of
from mopdctl.world.family.scores import pack, unpack
from mopdctl.world.family.stages import Stage, build_stages
from mopdctl.world.family.table import Recovery, less, over_seeds, recover, regret
from mopdctl.world.family.text import to_markdown
from mopdctl.world.files import write_configs


def rewards(right: dict[str, int], of: int = 100) -> dict[str, np.ndarray]:
    return {domain: np.array([1.0] * n + [0.0] * (of - n)) for domain, n in right.items()}


def test_recovery_is_the_sum_of_gains_over_the_sum_of_gaps_of_the_domains_whose_teacher_leads() -> None:
    before = rewards({"a": 20, "b": 50, "c": 90})
    teacher = rewards({"a": 80, "b": 60, "c": 90})  # c has nothing to pass on
    found = recover(before, teacher, rewards({"a": 50, "b": 65, "c": 0}))
    assert found is not None
    assert found.pct == pytest.approx(100 * (30 + 15) / (60 + 10))
    assert set(found.influence) == {"a", "b"}
    assert recover(before, before, teacher) is None


def test_student_and_teacher_themselves_are_zero_and_hundred_without_any_error() -> None:
    before, teacher = rewards({"a": 20, "b": 50}), rewards({"a": 80, "b": 60})
    for after, pct in ((before, 0.0), (teacher, 100.0)):
        found = recover(before, teacher, after)
        assert found is not None
        assert found.pct == pytest.approx(pct)
        assert over_seeds([found]).stderr_pct == pytest.approx(0.0, abs=1e-9)


def test_the_error_over_prompts_is_that_of_a_paired_bootstrap_within_domains() -> None:
    rng = np.random.default_rng(0)

    def draw(shares: dict[str, float]) -> dict[str, np.ndarray]:
        return {domain: (rng.random(300) < share).astype(float) for domain, share in shares.items()}

    before, teacher = draw({"a": 0.2, "b": 0.5}), draw({"a": 0.9, "b": 0.8})
    after = {domain: np.where(rng.random(300) < 0.7, teacher[domain], before[domain]) for domain in before}
    found = recover(before, teacher, after)
    assert found is not None
    drawn = []
    for _ in range(3000):
        rows = {domain: rng.integers(0, 300, 300) for domain in before}
        again = recover(*({d: one[d][rows[d]] for d in one} for one in (before, teacher, after)))
        assert again is not None
        drawn.append(again.pct)
    assert over_seeds([found]).stderr_pct == pytest.approx(np.std(drawn), rel=0.08)


def test_the_error_over_seeds_adds_to_that_over_prompts_which_does_not_shrink_with_more_seeds() -> None:
    noise = {"a": np.array([3.0, -1.0, -2.0, 0.0])}
    prompts = over_seeds([Recovery(80.0, noise)]).stderr_pct
    assert prompts == pytest.approx(np.sqrt(4 / 3 * 14))
    three = over_seeds([Recovery(pct, noise) for pct in (70.0, 80.0, 90.0)])
    assert three.pct == pytest.approx(80.0)
    assert three.prompts_pct == pytest.approx(prompts)
    assert three.seeds_pct == pytest.approx(10 / np.sqrt(3))
    assert three.stderr_pct == pytest.approx(np.hypot(prompts, 10 / np.sqrt(3)))


def test_errors_of_two_arms_on_the_same_prompts_cancel_in_their_difference() -> None:
    noise = {"a": np.array([5.0, -5.0])}
    assert over_seeds([less(Recovery(90.0, noise), Recovery(70.0, noise))]).stderr_pct == 0.0
    only = over_seeds([less(Recovery(90.0, noise), Recovery(70.0, {"b": noise["a"]}))])
    assert only.stderr_pct == pytest.approx(np.sqrt(2) * over_seeds([Recovery(0.0, noise)]).stderr_pct)


def test_advice_is_right_within_one_standard_error_of_the_best_and_the_best_is_the_same_for_all_seeds() -> None:
    def cell(sampled: float, exact: float) -> dict[str, Recovery]:
        return {"sampled": Recovery(sampled, {}), "exact": Recovery(exact, {})}

    close = [cell(80, 90), cell(90, 84)]  # exact is best on average by 2, +- 8 over seeds
    assert regret(close, ["sampled", "sampled"]).best == "exact"
    assert regret(close, ["sampled", "sampled"]).difference.pct == pytest.approx(2.0)
    assert regret(close, ["sampled", "sampled"]).right
    clear = [cell(70, 90), cell(72, 90)]
    told = regret(clear, ["sampled", "exact"])
    assert told.difference.pct == pytest.approx(10.0)
    assert told.difference.seeds_pct == pytest.approx(10.0)
    assert told.right  # by half: the error over seeds says so
    assert not regret(clear, ["sampled", "sampled"]).right
    assert regret(clear, ["exact", "exact"]).difference.pct == 0.0


def test_rewards_survive_packing() -> None:
    packed = {"a": pack([0.0, 1.0, 0.25, 1 / 3])}
    assert packed["a"] == "0 1 0.25 0.3333"
    assert unpack(packed)["a"].tolist() == [0.0, 1.0, 0.25, 0.3333]


shares = st.floats(0, 1) | st.sampled_from(list(asdict(Thresholds()).values()))


@settings(deadline=None)
@given(st.lists(st.tuples(shares, shares, shares), min_size=1, max_size=4))
def test_the_rule_that_is_fitted_is_the_rule_that_advises(teachers: list[tuple[float, float, float]]) -> None:
    told = overall({str(i): advise(Support(overlap, mass, far)) for i, (mass, overlap, far) in enumerate(teachers)})
    mass, overlap, far = (list(column) for column in zip(*teachers, strict=True))
    assert arm_for(Cell("", 0, min(mass), min(overlap), max(far), {}), Thresholds()) == ADVISED[told.choice]


def made_up(seed: int, mass: dict[str, float], best: dict[str, str]) -> dict[str, Any]:
    """A seed in which the arm in `best` reaches the teacher and the others half of it."""
    found: dict[str, Any] = {"seed": seed, "rewards": {}, "overlap": {}, "curves": {}, "seconds": {}}
    spread = lambda right: pack([1.0] * right + [0.0] * (100 - right))  # noqa: E731
    for setting, share in mass.items():
        where = SETTINGS[setting]
        found["rewards"][where.student] = dict.fromkeys(("lookup", *where.teachers), spread(20))
        found["rewards"] |= {model: {domain: spread(80)} for domain, model in where.teachers.items()}
        for arm in ADVISED.values():
            scores = dict.fromkeys(("lookup", *where.teachers), spread(80 if arm == best[setting] else 50))
            for domain in ("arithmetic", "instructions", "structured", "tools", "lookup", "errands"):
                scores.setdefault(domain, spread(20))
            found["rewards"][f"{setting}.{arm}"] = scores
        figures = {"student_mass": share, "top_k_overlap": 0.9, "impossible_share": 0.0}
        one = {"figures": {name: {"mean": value, "stderr": None} for name, value in figures.items()}}
        found["overlap"][setting] = {"teachers": {"t": one}, "advice": {"choice": "exact", "reason": ""}}
    return found


def test_thresholds_are_found_on_some_seeds_and_judged_on_the_others() -> None:
    mass = {"rlvr": 0.995, "weak-rlvr": 0.97, "outside": 0.93}
    best = {"rlvr": "exact", "weak-rlvr": "warm-up", "outside": "warm-up"}
    document = {"seeds": [made_up(seed, mass, best) for seed in (0, 1, 2)]}
    found = fit([document], [2])
    assert found["fit_seeds"] == [2]
    assert found["test_seeds"] == [0, 1]
    assert found["fitted"]["test"] == {"right": 3, "of": 3, "mean_regret_pct": 0.0, "wrong": []}
    assert found["present"]["test"]["right"] == 1  # 0.97 and 0.93 are said to be near enough
    assert found["always"]["warm-up"]["test"]["wrong"] == ["rlvr"]
    assert 0.97 < found["fitted"]["thresholds"]["warm_up_below_mass"] < 0.995
    with pytest.raises(InputError, match="no complete setting to test on"):
        fit([document], [0, 1, 2])


def test_the_summary_names_the_best_arm_and_what_was_lost() -> None:
    seeds = [made_up(seed, {"outside": 0.93}, {"outside": "warm-up"}) for seed in (0, 1)]
    found = summarize_advice(seeds, "outside")
    assert found is not None
    assert found["best"] == "warm-up"
    assert found["advised"] == ["exact", "exact"]
    assert found["recovery"]["exact"]["pct"] == pytest.approx(50.0)
    assert found["regret"]["pct"] == pytest.approx(50.0)
    assert not found["right"]
    del seeds[0]["rewards"]["outside.sampled"]  # not scored yet
    incomplete = summarize_advice(seeds, "outside")
    assert incomplete is not None
    assert incomplete["seeds"] == [1]


def test_steps_to_the_teacher_are_told_per_share_of_its_lead_and_null_where_never_reached() -> None:
    seed = made_up(0, {BASE: 1.0}, {BASE: "exact"})
    teachers = SETTINGS[BASE].teachers
    # On the first 50 prompts: student 20 of 50, teacher 50 of 50.
    seed["curves"]["exact"] = {str(step): dict.fromkeys(teachers, 40 + 60 * share) for step, share in
                               ((10, 0.4), (20, 0.85), (30, 0.8))}  # fmt: skip
    found = steps_to_teacher([seed], SETTINGS[BASE].student, teachers, 50)
    assert found == {"exact": {"50": [20], "80": [20], "90": [None], "100": [None]}}


def test_a_document_of_part_of_the_stages_says_what_is_not_there_and_renders() -> None:
    seed = made_up(0, {BASE: 1.0, "outside": 0.9}, {BASE: "exact", "outside": "warm-up"})
    document = to_document(full_scale(), [seed], [BASE, "outside"], ["exact", "merge"], pending=["seed 0 rlvr.merge"])
    json.dumps(document, allow_nan=False)
    assert document["summary"]["arms"]["merge"] is None
    del seed["rewards"][SETTINGS[BASE].teachers["tools"]]
    bare = to_document(full_scale(), [seed], [BASE], ["exact"])["summary"]["arms"]["exact"]
    assert bare["recovery"] is None  # a teacher has not been scored, the arm has
    assert bare["scores"]["arithmetic"] == pytest.approx(80.0)
    assert document["summary"]["arms"]["exact"]["recovery"]["pct"] == pytest.approx(100.0)
    assert document["summary"]["arms"]["none"]["recovery"]["pct"] == pytest.approx(0.0)
    text = to_markdown(document)
    assert "| exact | exact reverse KL: the base | 100.0 +- 0.0 |" in text
    assert "right in 1 of 2 settings" in text
    assert "1 stages pending" in text


def stage(name: str, needs: tuple[str, ...] = (), cost_s: float = 1.0) -> Stage:
    return Stage(name, needs, cost_s, {"name": name}, lambda: None)


def run_here(stages: dict[Key, Stage], failing: tuple[str, ...] = (), **given: Any) -> tuple[list[str], Any]:
    order: list[str] = []

    def submit(key: Key) -> "Future[float]":
        future: Future[float] = Future()
        order.append(key[1])
        if key[1] in failing:
            future.set_exception(ValueError("no"))
        else:
            future.set_result(0.0)
        return future

    settings_ = {"workers": 1, "deadline": time.monotonic() + 60, "done": []} | given
    done = settings_.pop("done")
    return order, run_all(stages, done, submit, on_done=lambda key, seconds: None, **settings_)


def test_the_longest_chain_begins_first_and_nothing_before_what_it_needs() -> None:
    stages = {(0, s.name): s for s in (stage("short"), stage("b", ("a",), 5), stage("a"), stage("c", ("b",), 5))}
    assert priorities(stages)[0, "a"] == 11.0
    order, outcome = run_here(stages)
    assert order == ["a", "b", "c", "short"]
    assert outcome.failed == {}
    assert outcome.pending == []


def test_a_failed_stage_stops_those_that_need_it_and_no_other() -> None:
    stages = {(0, s.name): s for s in (stage("a"), stage("b", ("a",)), stage("c", ("b",)), stage("d"))}
    order, outcome = run_here(stages, failing=("a",))
    assert sorted(order) == ["a", "d"]
    assert outcome.failed == {(0, "a"): "ValueError: no"}
    assert outcome.pending == [(0, "b"), (0, "c")]


def test_seeds_do_not_wait_for_each_other_and_what_is_done_is_not_run_again() -> None:
    stages = {(seed, s.name): s for seed in (0, 1) for s in (stage("a"), stage("b", ("a",)))}
    order, outcome = run_here(stages, done=[(0, "a"), (1, "a"), (1, "b")])
    assert order == ["b"]
    assert outcome.pending == []


def test_when_time_is_up_nothing_begins_and_all_that_is_left_is_told() -> None:
    order, outcome = run_here({(0, "a"): stage("a"), (0, "b"): stage("b", ("a",))}, deadline=time.monotonic() - 1)
    assert order == []
    assert outcome.pending == [(0, "a"), (0, "b")]


def test_a_mark_holds_for_the_same_stage_alone(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    assert not is_done(workspace, stage("score x"))
    run_marked(workspace, stage("score x"))
    assert is_done(workspace, stage("score x"))
    with pytest.raises(InputError, match="other settings; use a new workspace"):
        is_done(workspace, Stage("score x", (), 1.0, {"name": "another"}, lambda: None))


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = workspace_of(tmp_path_factory.mktemp("family"), 0)
    write_configs(workspace, full_scale().recipe, 0)
    return workspace


def test_every_arm_takes_the_steps_of_its_budget_and_as_many_answers_in_each(configured: Workspace) -> None:
    scale = full_scale()
    for name, arm in ARMS.items():
        if arm.kind == "grpo":
            rl = grpo_of(configured, scale, BASE, name).train
            assert rl.batch_size * rl.group_size == scale.recipe.mopd_batch
            assert rl.steps == arm.budget * scale.recipe.mopd1_steps
            continue
        train = teachers_of(configured, scale, BASE, name).train
        steps = train.steps + (train.warm_up.steps if train.warm_up else 0)
        assert steps == arm.budget * scale.recipe.mopd1_steps
        assert train.batch_size * train.samples_per_prompt == scale.recipe.mopd_batch


def test_one_factor_differs_from_the_base(configured: Workspace) -> None:
    def train(arm: str) -> dict[str, Any]:
        document = teachers_of(configured, full_scale(), BASE, arm).train.model_dump()
        return {key: value for key, value in document.items() if not key.startswith("eval_")}

    base = train("exact")
    assert base["objective"] == "exact"
    assert base["warm_start"] == "none"
    assert base["warm_up"] is None
    differs = {arm: {key for key in base if train(arm)[key] != base[key]} for arm in ("jsd", "exopd", "warm-up", "orm")}
    assert differs["jsd"] == {"divergence"}
    assert differs["exopd"] == {"extrapolation", "reference"}
    assert differs["warm-up"] == {"warm_up", "steps"}
    assert differs["orm"] == {"objective", "advantage_clip", "outcome_weight", "samples_per_prompt", "batch_size"}


def test_prompts_of_a_missing_teacher_go_to_the_student_itself(configured: Workspace) -> None:
    config = teachers_of(configured, full_scale(), "missing", "exact")
    assert "arithmetic" not in config.teachers
    assert config.teachers["self"].domains == ["arithmetic", "lookup"]
    assert config.teachers["self"].model == config.student


def test_the_stages_are_those_that_are_wanted_with_all_that_they_need(configured: Workspace) -> None:
    found = {s.name: s for s in build_stages(configured, full_scale(), 0, ("outside",), tuple(ARMS))}
    arms = ("sampled", "exact", "warm-up", "merge-start")
    assert {name for name in found if name.startswith("outside.")} == {f"outside.{arm}" for arm in arms}
    assert not {name for name in found if name.startswith(("weak", "rlvr."))}
    whole = {s.name: s for s in build_stages(configured, full_scale(), 0, tuple(SETTINGS), tuple(ARMS))}
    assert all(needed in whole for s in whole.values() for needed in s.needs)
    assert {f"{BASE}.{arm}" for arm in ARMS} <= whole.keys()
    again = {s.name for s in build_stages(configured, full_scale(), 0, ("mopd1",), ("sampled",))}
    assert "rlvr.exact" in again  # the student of that setting
    assert "score rlvr.exact" in again


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_experiment_goes_on_and_ends_with_the_bytes_of_one_that_was_not(tmp_path: Path) -> None:
    def command(root: Path) -> list[str]:
        given = f"--workspace {root} --seeds 0 --settings {BASE} --arms sampled --workers 2 --quick"
        return [sys.executable, "-m", "mopdctl.world.family", *given.split()]

    killed, whole = tmp_path / "killed", tmp_path / "whole"
    first = subprocess.Popen(command(killed), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    mark = mark_path(workspace_of(killed, 0), "rlvr-arithmetic")
    while not mark.exists():
        assert first.poll() is None
        time.sleep(0.1)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    time.sleep(2)  # its workers see it
    written = mark.stat().st_mtime_ns
    documents = []
    for root in (killed, whole):
        ended = subprocess.run(command(root), capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        documents.append(json.loads(ended.stdout))
    assert mark.stat().st_mtime_ns == written
    for document in documents:
        assert document["failed"] == {}
        assert document["pending"] == []
        del document["seeds"][0]["seconds"]
        document["summary"]["arms"] = {arm: one | {"seconds": 0} for arm, one in document["summary"]["arms"].items()}
    assert documents[0] == documents[1]


def test_an_unknown_setting_is_told_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--workspace", "w", "--settings", "nowhere"])
    assert "'nowhere': settings are rlvr, sft" in capsys.readouterr().err


def test_the_quick_scale_changes_amounts_alone() -> None:
    full, quick = full_scale().recipe, quick_scale().recipe
    assert full.objective == quick.objective
    assert full.mopd_rate == quick.mopd_rate
    assert quick.mopd_batch < full.mopd_batch
