"""Profiles: what is asked of the model, and how its answers become rewards and states."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopdctl.engines.tokenizers import ChatTokenizer
from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import file_digest, read_json, write_json, write_jsonl
from mopdctl.pivots import profile as profiling
from mopdctl.pivots.candidates import Candidate, write_candidates
from mopdctl.pivots.folder import load_profile
from mopdctl.pivots.profile import ProfileSpec, run_profile, usable_prompts
from mopdctl.pivots.profiled import profile_row, profiled, read_profile
from mopdctl.records import Sample
from mopdctl.rollouts.run import RolloutSpec
from mopdctl.runs import Workspace
from mopdctl.store.store import StoreWriter

TOOL = {
    "type": "function",
    "function": {"name": "find", "parameters": {"type": "object", "properties": {"name": {"type": "string"}}}},
}
FIND = {"type": "function_call", "name": "find", "arguments": '{"name": "kalo"}'}
SAY = {"type": "message", "content": "tode"}


def candidate(turn: int, content: str = "Find kalo", *, action: dict[str, Any] = FIND, **changes: Any) -> Candidate:
    messages = ({"role": "user", "content": content},)
    made = Candidate(f"t#{turn}", "t", turn, messages, (TOOL,), action, domain="errands", source="t.jsonl:1")
    return replace(made, **changes)


# ------------------------------------------------------------------------------------------------------------- records


def test_a_state_is_null_and_counted_never_a_reward() -> None:
    found = profiled(candidate(3), [("ok", 1.0), ("timeout", None), ("ok", 0.0), ("truncated", 1.0)])
    assert found.rewards == (1.0, None, 0.0, None)
    assert found.states == {"ok": 2, "timeout": 1, "truncated": 1}
    assert (found.mean, found.variance, found.depth, found.tool) == (0.5, 0.25, 3, "find")
    nothing = profiled(candidate(0, action=SAY), [("timeout", None)] * 2)
    assert (nothing.mean, nothing.variance, nothing.tool) == (None, None, "(message)")


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path) -> None:
    found = [profiled(candidate(0), [("ok", 0.1)] * 3), profiled(candidate(1, action=SAY), [("infra_error", None)] * 3)]
    write_jsonl(tmp_path / "profile.jsonl", map(profile_row, found))
    assert read_profile(tmp_path / "profile.jsonl") == found
    assert [one.variance for one in found] == [0.0, None]


@pytest.mark.parametrize("rewards", [[1.5], ["1"], [True], [float("nan")], None])
def test_a_profile_with_what_is_no_reward_is_refused(tmp_path: Path, rewards: Any) -> None:
    # huggingface/OpenEnv #1199: rewards that are no number in [0, 1] were taken
    row = profile_row(profiled(candidate(0), [("ok", 1.0)])) | {"rewards": rewards}
    (tmp_path / "profile.jsonl").write_text(
        str(row).replace("'", '"').replace("nan", "NaN").replace("None", "null").replace("True", "true") + "\n"
    )
    with pytest.raises(InputError, match=r"profile\.jsonl:1: not a line of a profile"):
        read_profile(tmp_path / "profile.jsonl")


# ------------------------------------------------------------------------------------------------------------- prompts


def after(arguments: str) -> tuple[dict[str, Any], ...]:
    """A state after a call with these arguments."""
    call = {"id": "a", "type": "function", "function": {"name": "find", "arguments": arguments}}
    return (
        {"role": "user", "content": "Find"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "3"},
    )


def test_candidates_that_cannot_be_asked_have_a_state_and_stop_nothing(tiny: Path) -> None:
    chat = ChatTokenizer.load(str(tiny / "models" / "student"))
    good = candidate(0)
    prompts, unusable = usable_prompts(
        [
            good,
            candidate(1, "x " * 200),
            candidate(2, messages=({"role": "wizard", "content": "x"},)),
            candidate(3, action={"type": "function_call", "name": "find", "arguments": "[]"}),
            candidate(4, messages=after('{"name": 1e999}')),
            candidate(5, messages=after('{"name": NaN}')),
            candidate(6, messages=after('{"name": "\\ud800"}')),
            candidate(7, messages=after('{"name": ' + "[" * 200 + "]" * 200 + "}")),
        ],
        chat,
        max_new_tokens=16,
    )
    assert {key: state for key, (state, _) in unusable.items()} == {
        "t#1": "prompt_too_long",
        "t#2": "prompt_refused",
        "t#3": "invalid_reference",
        **{f"t#{turn}": "prompt_refused" for turn in (4, 5, 6, 7)},
    }
    assert "t.jsonl:1" in unusable["t#1"][1]
    assert "unknown role 'wizard'" in unusable["t#2"][1]
    assert len(prompts) == 1
    asked = prompts[0]
    assert (asked.prompt_id, asked.verifier, asked.reference, asked.tools) == ("t#0", "action", FIND, (TOOL,))
    assert (asked.messages, asked.routing, asked.environment) == (good.messages, {"domain": "errands"}, None)


# ----------------------------------------------------------------------------------------------------------- whole run


def answer(candidate_id: str, number: int, reward: float | None, state: str | None, reason: str) -> Sample:
    return Sample(
        sample_id=f"{candidate_id}/{number}@0",
        prompt_id=candidate_id,
        group_id=candidate_id,
        generation_index=number,
        domain="errands",
        teacher_id="",
        policy_version_min=0,
        policy_version_max=0,
        tokens=np.array([1, 2], np.int32),
        prompt_length=1,
        loss_mask=np.array([False, True]),
        behavior_logprobs=np.zeros(1, np.float32),
        finish_reason=reason,
        reward=reward,
        verdict=state,
        verifier="action/1" if state else None,
    )


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    place = Workspace(tmp_path / "ws")
    folder = place.pivots("set")
    write_candidates(folder / "candidates.jsonl", [candidate(0), candidate(1, "x " * 200), candidate(2)])
    digest = file_digest(folder / "candidates.jsonl")
    write_json(folder / "manifest.json", {"candidates": {"count": 3, "digest": digest}})
    return place


Answers = list[tuple[str, int, float | None, str | None, str]]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answers], list[RolloutSpec]]:
    """Puts answers into the store in place of a model's; returns what was asked for."""

    def prepare(answers: Answers) -> list[RolloutSpec]:
        asked: list[RolloutSpec] = []

        def run(spec: RolloutSpec, workspace: Workspace, **_: Any) -> dict[str, Any]:
            asked.append(spec)
            with StoreWriter(workspace.rollouts(spec.name), {"tokenizer": "t"}) as writer:
                writer.commit([answer(*one) for one in answers])
            return {}

        monkeypatch.setattr(profiling, "run_rollout", run)
        return asked

    return prepare


GOOD: Answers = [
    ("t#2", 1, 1.0, "ok", "stop"),
    ("t#0", 1, None, "parse_error", "stop"),
    ("t#0", 0, 1.0, "ok", "stop"),
    ("t#2", 0, 0.0, "ok", "length"),  # cut off: nobody knows what it would have become
]


def spec_for(tiny: Path, **changes: Any) -> ProfileSpec:
    return replace(ProfileSpec("set", str(tiny / "models" / "student"), rollouts=2, max_new_tokens=16), **changes)


def test_a_profile_has_every_candidate_in_order_with_every_answer(
    tiny: Path, workspace: Workspace, engine: Callable[[Answers], list[RolloutSpec]]
) -> None:
    asked, notes = engine(GOOD), list[str]()
    document = run_profile(spec_for(tiny), workspace, on_note=notes.append)
    assert [(s.name, s.samples, len(s.prompts)) for s in asked] == [("set.profile-student", 2, 2)]  # type: ignore[arg-type]
    about, found = load_profile(workspace.pivots("set"), None)
    assert [(one.candidate_id, one.rewards) for one in found] == [
        ("t#0", (1.0, None)),
        ("t#1", (None, None)),
        ("t#2", (None, 1.0)),
    ]
    assert about["states"] == {"ok": 2, "parse_error": 1, "prompt_too_long": 2, "truncated": 1}
    assert (about["candidates"], about["profiled"], about["rollouts"], about["mixed"]) == (3, 2, 6, 0)
    assert document["label"] == "student"
    assert len(notes) == 1
    assert notes[0].startswith("1 candidates are not asked, prompt_too_long: candidate t#1 (t.jsonl:1): ")
    run_profile(spec_for(tiny), workspace)
    assert len(asked) == 1  # what is finished is not asked again


def test_too_few_answers_are_an_error_not_a_profile(
    tiny: Path, workspace: Workspace, engine: Callable[[Answers], list[RolloutSpec]]
) -> None:
    # NVIDIA-NeMo/RL #2394: fewer rollouts than asked for went on without a word
    engine(GOOD[:-1])
    with pytest.raises(MopdctlError, match="1 of 2 answers to t#2"):
        run_profile(spec_for(tiny), workspace)
    with pytest.raises(InputError, match="no finished profiles"):
        load_profile(workspace.pivots("set"), None)


def test_a_candidate_without_any_answer_is_an_error(
    tiny: Path, workspace: Workspace, engine: Callable[[Answers], list[RolloutSpec]]
) -> None:
    engine([one for one in GOOD if one[0] == "t#0"])
    with pytest.raises(MopdctlError, match="0 of 2 answers to t#2"):
        run_profile(spec_for(tiny), workspace)


def test_an_answer_that_nobody_judged_is_an_error(
    tiny: Path, workspace: Workspace, engine: Callable[[Answers], list[RolloutSpec]]
) -> None:
    engine([*GOOD[:-1], ("t#2", 0, None, None, "stop")])
    with pytest.raises(MopdctlError, match="an answer to t#2 was never judged"):
        run_profile(spec_for(tiny), workspace)


def test_another_configuration_makes_a_profile_beside_the_first_only_where_asked(
    tiny: Path, workspace: Workspace, engine: Callable[[Answers], list[RolloutSpec]]
) -> None:
    engine(GOOD)
    run_profile(spec_for(tiny), workspace)
    with pytest.raises(InputError, match=r"of another configuration \(seed was \d+, now \d+\); give --reprofile"):
        run_profile(spec_for(tiny, seed=1), workspace)
    second = run_profile(spec_for(tiny, seed=1, reprofile=True), workspace)
    assert second["label"].startswith("student-")
    assert run_profile(spec_for(tiny, seed=1, reprofile=True), workspace) == second
    assert run_profile(spec_for(tiny, reprofile=True), workspace)["label"] == "student"
    folder = workspace.pivots("set")
    with pytest.raises(InputError, match="has 2 finished profiles; choose with --profile"):
        load_profile(folder, None)
    assert load_profile(folder, second["label"])[0]["config"]["seed"] == 1


def test_a_profile_that_was_changed_or_is_of_other_candidates_is_refused(
    tiny: Path, workspace: Workspace, engine: Callable[[Answers], list[RolloutSpec]]
) -> None:
    engine(GOOD)
    place = Path(run_profile(spec_for(tiny), workspace)["path"])
    before = (place / "profile.jsonl").read_text()
    (place / "profile.jsonl").write_text(before.replace("1.0", "0.0"))
    with pytest.raises(InputError, match="is not what was profiled"):
        load_profile(workspace.pivots("set"), "student")
    (place / "profile.jsonl").write_text(before)
    write_json(place / "profile.json", read_json(place / "profile.json") | {"config": {"candidates": "other"}})
    with pytest.raises(InputError, match="profile of other candidates"):
        load_profile(workspace.pivots("set"), "student")


def test_at_temperature_zero_there_is_nothing_to_profile(tiny: Path, workspace: Workspace) -> None:
    with pytest.raises(InputError, match="at 0 all rewards are equal"):
        run_profile(spec_for(tiny, temperature=0.0), workspace)
