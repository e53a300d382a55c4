"""Scores on held-out prompts: what counts for the mean, and what does not."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError, MopdctlError
from mopdctl.records import Prompt
from mopdctl.rollouts.book import AnswerSettings, PromptBook
from mopdctl.rollouts.held_out import HeldOutScore, held_out_score
from mopdctl.verifiers import Verdict, VerdictState
from mopdctl.verifiers.pool import VerifierPool

OK, BROKEN, TIMEOUT = VerdictState.OK, VerdictState.INFRA_ERROR, VerdictState.TIMEOUT


@pytest.fixture(scope="module")
def student(tiny: Path) -> HFModel:
    return HFModel.load(str(tiny / "models" / "student"))


def verdict(state: VerdictState, reward: float | None = None) -> Verdict:
    return Verdict(state, reward, "exact_match", 2)


def score(student: HFModel, monkeypatch: pytest.MonkeyPatch, *verdicts: Verdict) -> HeldOutScore:
    """The score where the checks of the answers say `verdicts`."""

    def check(self: VerifierPool, attempts: Iterable[object]) -> list[Verdict]:
        assert len(list(attempts)) == len(verdicts)
        return list(verdicts)

    monkeypatch.setattr(VerifierPool, "check", check)
    prompts = [
        Prompt(f"p{n}", ({"role": "user", "content": f"{n}"},), None, {}, verifier="exact_match", place=f"dev:{n}")
        for n in range(len(verdicts))
    ]
    book = PromptBook(student, prompts, lambda prompt: AnswerSettings(4))
    with VerifierPool() as pool:
        return held_out_score(student, book, range(len(prompts)), None, pool)


def test_an_answer_without_form_or_end_earns_nothing(student: HFModel, monkeypatch: pytest.MonkeyPatch) -> None:
    said = verdict(OK, 1.0), verdict(VerdictState.PARSE_ERROR), verdict(TIMEOUT), verdict(OK, 0.5)
    assert score(student, monkeypatch, *said) == (37.5, 0)


def test_a_check_that_broke_is_no_score_and_is_counted(student: HFModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert score(student, monkeypatch, verdict(BROKEN), verdict(OK, 1.0), verdict(BROKEN)) == (100.0, 2)


def test_no_check_at_all_is_no_score_of_zero(student: HFModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MopdctlError, match="no held-out answer could be checked") as caught:
        score(student, monkeypatch, verdict(BROKEN), verdict(BROKEN))
    assert not isinstance(caught.value, InputError)


def test_an_unusable_reference_is_named(student: HFModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"dev:[01]: its reference is unusable"):
        score(student, monkeypatch, verdict(OK, 1.0), verdict(VerdictState.INVALID_REFERENCE))
