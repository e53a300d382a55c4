"""The engine without weights has a law that can be written down, and a sample that hangs on its own seed alone."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from mopdctl.engines import fake
from mopdctl.engines.base import Completion, SampleRequest, sample, stream_seed
from mopdctl.engines.fake import CALL, END, FIRST, FakeModel
from mopdctl.errors import InputError

MODEL = FakeModel(mean_length=12, sigma=0.8, vocab_size=50)


def request(number: int, *, budget: int = 60, response_ids: Sequence[int] = (), salt: str = "") -> SampleRequest:
    return SampleRequest(f"s{number}", (5, 6), budget, stream_seed("test", number, salt), tuple(response_ids))


def answers(model: FakeModel, requests: Sequence[SampleRequest], *, temperature: float = 1.0) -> list[Completion]:
    return sample(model, requests, temperature=temperature)


def survival(model: FakeModel, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """The chance that a log-normal length is above each of these."""
    mu = math.log(model.mean_length) - model.sigma**2 / 2
    return np.array([math.erfc((math.log(n) - mu) / (model.sigma * math.sqrt(2))) / 2 if n else 1.0 for n in lengths])


def farthest(lengths: Sequence[int], law: NDArray[np.float64]) -> float:
    """Largest distance of the share of lengths above 0, 1, ... from `law`, in units of 1/sqrt(n)."""
    above = (np.array(lengths)[:, None] > np.arange(len(law))).mean(axis=0)
    return float(np.abs(above - law).max() * math.sqrt(len(lengths)))


# ------------------------------------------------------------------------------------------------------------- its name


def test_options_are_read_from_the_name() -> None:
    assert FakeModel.parse("fake") == FakeModel.parse("fake:") == FakeModel()
    assert FakeModel.parse(
        "fake:mean_length=7,sigma=0.5,calls=0.1,vocab_size=9,step_s=0.25", batch_size=3
    ) == FakeModel(7.0, 0.5, 0.1, 9, 3, 0.25)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("student", "the fake engine has one model, 'fake'"),
        ("org/name:main", "the fake engine has one model, 'fake'"),
        ("fake:length=3", "'length=3' is no option of the fake engine; it has mean_length, sigma, calls, vocab_size"),
        ("fake:mean_length", "'mean_length' is no option"),
        ("fake:mean_length=long\n", "'mean_length=long\\\\n' is no option"),
        ("fake:vocab_size=9.5", "'vocab_size=9.5' is no option"),
        ("fake:batch_size=4", "'batch_size=4' is no option"),
        *[
            (f"fake:{option}", "takes a finite mean_length above 0")
            for option in (
                *("mean_length=0", "mean_length=nan", "mean_length=inf", "sigma=0", "sigma=1e200", "calls=1"),
                *("calls=-0.1", "vocab_size=2", "vocab_size=9999999999", "step_s=-1", "step_s=inf"),
            )
        ],
    ],
)
def test_a_name_that_cannot_be_used_is_one_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        FakeModel.parse(text)
    assert "\n" not in str(caught.value)


def test_a_prompt_is_its_bytes_as_ordinary_tokens() -> None:
    assert FakeModel(vocab_size=1000).prompt_ids("aé") == (99, 197, 171)
    small = FakeModel(vocab_size=4).prompt_ids("any text")
    assert len(small) == 8
    assert set(small) <= {FIRST, FIRST + 1}


# -------------------------------------------------------------------------------------------------------------- its law


@pytest.mark.parametrize("model", [MODEL, FakeModel(), FakeModel(mean_length=200, sigma=0.3)])
def test_hazards_multiply_to_the_survival_of_a_log_normal(model: FakeModel) -> None:
    chain = np.cumprod(1 - model.hazard(300))
    np.testing.assert_allclose(chain, survival(model, np.arange(1, 301)), rtol=1e-9, atol=1e-12)


def test_the_hazard_of_a_position_does_not_depend_on_the_budget() -> None:
    assert np.array_equal(MODEL.hazard(20), MODEL.hazard(100)[:20])


def test_lengths_follow_the_law_and_the_budget_cuts_them() -> None:
    found = answers(replace(MODEL, batch_size=2000), [request(i, budget=40) for i in range(2000)])
    lengths = [len(answer.token_ids) for answer in found]
    assert farthest(lengths, survival(MODEL, np.arange(40))) < 1.63  # 1.63 is passed once in a hundred seeds
    assert farthest(lengths, survival(replace(MODEL, mean_length=15), np.arange(40))) > 3
    cut = [answer for answer in found if answer.finish_reason == "length"]
    assert {len(answer.token_ids) for answer in cut} == {40}
    assert all((END in answer.token_ids) == (answer.finish_reason == "stop") for answer in found)
    assert abs(len(cut) / 2000 - survival(MODEL, np.array([40]))[0]) < 0.012


def test_an_answer_that_goes_on_with_other_random_numbers_has_the_law_of_those_that_came_so_far() -> None:
    there = [FIRST] * 9
    rest = [request(i, response_ids=there, salt="another process") for i in range(1500)]
    lengths = [9 + len(answer.token_ids) for answer in answers(replace(MODEL, batch_size=1500), rest)]
    law = survival(MODEL, np.arange(60))
    assert farthest(lengths, np.minimum(law / law[9], 1)) < 1.63
    assert farthest(lengths, law) > 10


@pytest.mark.parametrize("calls", [0.0, 0.15])
def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(calls: float) -> None:
    model = replace(MODEL, calls=calls, batch_size=1000)
    found = answers(model, [request(i) for i in range(1000)])
    tokens = np.array([token for answer in found for token in answer.token_ids])
    end = model.hazard(60)[[t for answer in found for t in range(len(answer.token_ids))]]
    law = np.array([end, (1 - end) * calls, (1 - end) * (1 - calls)])  # end token, call, any of the ordinary ones
    kind = np.minimum(tokens, FIRST)
    each = law[kind, np.arange(len(tokens))] / np.where(kind == FIRST, model.vocab_size - FIRST, 1)
    logprobs = [logprob for answer in found for logprob in answer.logprobs]
    np.testing.assert_allclose(logprobs, np.log(each), rtol=1e-6)

    expected = law.sum(axis=1)
    seen = np.bincount(kind, minlength=3)
    assert (np.abs(seen - expected) < 4 * np.sqrt(expected) + 1e-9).all()
    words = np.bincount(tokens, minlength=model.vocab_size)[FIRST:]
    assert len(words) == model.vocab_size - FIRST
    assert ((words - words.mean()) ** 2 / words.mean()).sum() < 90  # chi-square of 47: above 90 once in 6000 seeds


def test_a_call_ends_the_turn_and_occurs_only_where_it_is_asked_for() -> None:
    found = answers(replace(MODEL, calls=0.2), [request(i) for i in range(200)])
    assert {answer.token_ids[-1] for answer in found if answer.finish_reason == "stop"} == {END, CALL}
    assert all(token >= FIRST for answer in found for token in answer.token_ids[:-1])
    assert all(CALL not in answer.token_ids for answer in answers(MODEL, [request(i) for i in range(200)]))


# ------------------------------------------------------------------------------------- what a sample does not depend on


def test_a_sample_depends_neither_on_its_batch_nor_on_the_temperature() -> None:
    requests = [request(i, budget=10 + i) for i in range(40)]
    alone = [answers(MODEL, [r])[0] for r in requests]
    assert len({answer.token_ids for answer in alone}) == 40
    for batch_size in (1, 3, 64):
        for temperature in (0.0, 1.0, 2.5):
            model = replace(MODEL, batch_size=batch_size)
            assert answers(model, requests, temperature=temperature) == alone
    assert answers(MODEL, requests[::-1]) == alone[::-1]


def test_an_answer_goes_on_after_what_is_there() -> None:
    for number in range(30):
        (whole,) = answers(MODEL, [request(number)])
        for cut in range(len(whole.token_ids)):
            (rest,) = answers(MODEL, [request(number, response_ids=whole.token_ids[:cut])])
            assert rest == Completion(whole.token_ids[cut:], whole.logprobs[cut:], whole.finish_reason)


def test_a_smaller_budget_gives_the_beginning_of_the_same_answer() -> None:
    (whole,) = answers(MODEL, [request(1)])
    length = len(whole.token_ids)
    assert whole.finish_reason == "stop"
    for budget in range(1, length + 1):
        (cut,) = answers(MODEL, [request(1, budget=budget)])
        assert cut.token_ids == whole.token_ids[:budget]
        assert cut.finish_reason == ("stop" if budget == length else "length")


# ------------------------------------------------------------------------------------------------------------ its steps


def test_a_spent_budget_is_no_token_and_length() -> None:
    spent, other = request(0, budget=3, response_ids=(7, 8, 9)), request(1)
    first, second = answers(MODEL, [spent, other])
    assert first == Completion((), (), "length")
    assert second == answers(MODEL, [other])[0]
    assert answers(MODEL, []) == []


def test_a_step_gives_each_running_request_one_token() -> None:
    requests = [request(i) for i in range(11)]
    running = most = 0
    finished: dict[int, str] = {}
    for step in replace(MODEL, batch_size=4).stream(requests, temperature=1):
        assert len(set(step.requests.tolist())) == len(step.requests) == len(step.token_ids) == len(step.logprobs)
        assert not finished.keys() & set(step.requests.tolist())
        assert (step.requests.dtype, step.token_ids.dtype, step.logprobs.dtype) == (np.int64, np.int32, np.float32)
        running, most = len(step.requests), max(most, len(step.requests))
        finished |= step.finished
    assert (most, running > 0, finished.keys()) == (4, True, set(range(11)))


def test_a_step_takes_the_time_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(fake.time, "sleep", slept.append)
    (answer,) = answers(replace(MODEL, step_s=0.5), [request(1)])
    assert slept == [0.5] * len(answer.token_ids)
