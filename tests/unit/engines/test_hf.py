"""Sampling and scoring against a float64 reference: one unpadded sequence at a time, the whole row recomputed.

FLOAT32: float32 models, whose attention over a cache and over padding sums in another order than the reference. Logits
reach about 20 here, so that float32 rounding (6e-8 relative) grows to some 1e-5 through two layers.
FLOAT64: the same in float64 models whose results are not cast down.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mopdctl.engines import hf
from mopdctl.engines.base import Completion, SampleRequest, stream_seed
from mopdctl.engines.hf import HFModel, _choose
from mopdctl.errors import InputError
from mopdctl.objective.head import head_logits

FLOAT32 = 5e-5
FLOAT64 = 1e-10

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def model(make_llama: Make, tokenizer: Any) -> HFModel:
    return HFModel(make_llama(), tokenizer)


@pytest.fixture(scope="module")
def model64(make_llama: Make, tokenizer: Any) -> HFModel:
    return HFModel(make_llama().double(), tokenizer, dtype=torch.float64)


def requests(count: int, *, max_new_tokens: Sequence[int] = (20,), seed: int = 0) -> list[SampleRequest]:
    """Prompts of 1 to 9 tokens; budgets are taken in turn."""
    return [
        SampleRequest(
            f"s{i}",
            tuple((7 * i + 3 * j) % 100 for j in range(1 + (5 * i) % 9)),
            max_new_tokens[i % len(max_new_tokens)],
            stream_seed(seed, i),
        )
        for i in range(count)
    ]


def reference(model: HFModel, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0) -> list[float]:
    """log p of each response token: one unpadded forward pass in float64, logits at t - 1 against the token at t."""
    wide = model.model
    if next(wide.parameters()).dtype != torch.float64:
        wide = type(wide)(wide.config).eval()
        wide.load_state_dict(model.model.state_dict())
        wide = wide.double()
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = wide(input_ids=ids, use_cache=False).logits[0, :, : len(model.tokenizer)]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return [float(logprobs[len(prompt) + t - 1, token]) for t, token in enumerate(response)]


def tokens(completions: list[Completion]) -> list[tuple[tuple[int, ...], str]]:
    return [(c.token_ids, c.finish_reason) for c in completions]


# ----------------------------------------------------------------------------------------------------------- sampling


def test_a_sample_depends_on_its_own_seed_and_prompt_alone(make_llama: Make, tokenizer: Any) -> None:
    asked = requests(14, max_new_tokens=(20, 3, 11))
    llama = make_llama()
    together = HFModel(llama, tokenizer).sample(asked, temperature=1.0)
    for batch_size in (1, 4):
        other = HFModel(llama, tokenizer, batch_size=batch_size).sample(asked, temperature=1.0)
        assert tokens(other) == tokens(together)
    order = [(5 * i + 2) % len(asked) for i in range(len(asked))]
    shuffled = HFModel(llama, tokenizer, batch_size=5).sample([asked[i] for i in order], temperature=1.0)
    assert tokens(shuffled) == [tokens(together)[i] for i in order]
    for one, other in zip((together[i] for i in order), shuffled, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=FLOAT32)


def test_an_answer_goes_on_after_what_is_there(model: HFModel) -> None:
    asked = requests(10, max_new_tokens=(1, 5, 24, 24, 24))
    whole = model.sample(asked, temperature=1.0)
    parts = [
        replace(r, response_ids=c.token_ids[: i % 4 * 2]) for i, (r, c) in enumerate(zip(asked, whole, strict=True))
    ]
    parts = [r for r, c in zip(parts, whole, strict=True) if len(r.response_ids) < len(c.token_ids)]
    by_id = {r.sample_id: c for r, c in zip(asked, whole, strict=True)}
    assert len({len(r.response_ids) for r in parts}) > 2
    for request, rest in zip(parts, model.sample(parts, temperature=1.0), strict=True):
        done, expected = len(request.response_ids), by_id[request.sample_id]
        assert (rest.token_ids, rest.finish_reason) == (expected.token_ids[done:], expected.finish_reason)
        assert rest.logprobs == pytest.approx(expected.logprobs[done:], abs=FLOAT32)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_forced_tokens_lead_to_the_same_bits(make_llama: Make, tokenizer: Any, temperature: float) -> None:
    model = HFModel(make_llama(), tokenizer, batch_size=7)
    asked = requests(16, max_new_tokens=(1, 5, 24, 24, 24))
    whole = model.sample(asked, temperature=temperature)
    again = []
    for i, (request, completion) in enumerate(zip(asked, whole, strict=True)):
        ids = completion.token_ids[: i % 4 * 3]
        ended = len(ids) == len(completion.token_ids)
        again.append(replace(request, forced_ids=ids, max_new_tokens=len(ids) if ended else request.max_new_tokens))
    assert sum(len(r.forced_ids) == r.max_new_tokens for r in again) > 1
    for request, rest, full in zip(again, model.sample(again, temperature=temperature), whole, strict=True):
        done = len(request.forced_ids)
        assert (rest.token_ids, rest.logprobs) == (full.token_ids[done:], full.logprobs[done:])
        assert done == len(full.token_ids) or rest.finish_reason == full.finish_reason


def test_a_spent_budget_is_no_token_and_length(model: HFModel) -> None:
    spent, fresh = requests(2, max_new_tokens=(4,))
    found = model.sample([replace(spent, response_ids=(3, 4, 5, 6)), fresh], temperature=1.0)
    assert found[0] == Completion((), (), "length")
    assert found[1] == model.sample([fresh], temperature=1.0)[0]


def test_a_stream_that_is_left_leaves_the_model_in_training_mode(make_llama: Make, tokenizer: Any) -> None:
    training = HFModel(make_llama().train(), tokenizer)
    stream = training.stream(requests(2), temperature=1.0)
    next(stream)
    assert torch.is_grad_enabled()
    stream.close()
    assert training.model.training


def test_another_seed_gives_another_answer(model: HFModel) -> None:
    one, other = (model.sample(requests(6, seed=s), temperature=1.0) for s in (0, 1))
    assert all(a.token_ids != b.token_ids for a, b in zip(one, other, strict=True))


def test_a_smaller_budget_gives_the_beginning_of_the_same_answer(model: HFModel) -> None:
    long = model.sample(requests(8, max_new_tokens=(24,)), temperature=1.0)
    short = model.sample(requests(8, max_new_tokens=(1, 2, 5, 9, 24)), temperature=1.0)
    for request, whole, part in zip(requests(8, max_new_tokens=(1, 2, 5, 9, 24)), long, short, strict=True):
        assert part.token_ids == whole.token_ids[: request.max_new_tokens]
        assert len(part.logprobs) == len(part.token_ids)


def test_answers_that_leave_the_batch_early_do_not_change_the_others(model: HFModel) -> None:
    asked = requests(8, max_new_tokens=(1, 2, 3, 5, 8, 13, 21, 40))
    together = model.sample(asked, temperature=1.0)
    alone = [model.sample([request], temperature=1.0)[0] for request in asked]
    assert tokens(together) == tokens(alone)
    assert max(len(c.token_ids) for c in together) == 40
    for request, completion in zip(asked, together, strict=True):
        assert completion.logprobs == pytest.approx(
            reference(model, request.prompt_ids, completion.token_ids), abs=FLOAT32
        )


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_behaviour_logprobs_are_those_of_the_tempered_distribution(model: HFModel, temperature: float) -> None:
    asked = requests(6)
    for request, completion in zip(asked, model.sample(asked, temperature=temperature), strict=True):
        by_hand = reference(model, request.prompt_ids, completion.token_ids, temperature)
        assert completion.logprobs == pytest.approx(by_hand, abs=FLOAT32)


def test_scores_of_samples_are_their_behaviour_logprobs_at_temperature_one(model: HFModel) -> None:
    asked = requests(9, max_new_tokens=(20, 4))
    completions = model.sample(asked, temperature=1.0)
    scores = model.score([(r.prompt_ids, c.token_ids) for r, c in zip(asked, completions, strict=True)])
    for completion, score in zip(completions, scores, strict=True):
        assert completion.logprobs == pytest.approx(score, abs=FLOAT32)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_frequencies_match_the_distribution(model: HFModel, temperature: float) -> None:
    prompt, count = (4, 8, 15), 6_000
    asked = [SampleRequest(str(i), prompt, 1, stream_seed("frequency", i)) for i in range(count)]
    seen = torch.zeros(len(model.tokenizer), dtype=torch.float64)
    for completion in model.sample(asked, temperature=temperature):
        seen[completion.token_ids[0]] += 1
    expected = torch.tensor(
        [reference(model, prompt, [token], temperature)[0] for token in range(len(model.tokenizer))]
    ).exp()
    assert float(expected.sum()) == pytest.approx(1.0, abs=1e-6)
    spread = (expected * (1 - expected) / count).sqrt()
    # five standard deviations, and a count of ten where a probability is so small that the normal law says nothing
    assert ((seen / count - expected).abs() <= 5 * spread + 10 / count).all()
    often = expected * count >= 10
    chi_square = float(((seen - expected * count)[often] ** 2 / (expected * count)[often]).sum())
    degrees = int(often.sum())
    assert degrees >= 10
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5  # mean and standard deviation of chi square


def test_a_draw_of_zero_never_picks_a_token_without_probability() -> None:
    logits = torch.tensor([[-torch.inf, -torch.inf, 0.0, 1.0]])
    chosen, logprobs = _choose(logits, torch.tensor([0.0], dtype=torch.float64), 1.0)
    assert chosen.tolist() == [2]
    assert logprobs.item() == pytest.approx(-math.log(1 + math.e), rel=1e-6)


# --------------------------------------------------------------------------------------------------- ends and lengths


def test_an_answer_ends_with_the_first_end_token_of_either_kind(make_llama: Make, tokenizer: Any) -> None:
    llama = make_llama()
    asked = requests(24, max_new_tokens=(30,))
    free = HFModel(llama, tokenizer).sample(asked, temperature=1.0)
    # Take for end tokens two that the model likes; the streams stay the same, so its answers are the old ones, cut.
    counts = torch.bincount(torch.tensor([t for c in free for t in c.token_ids[1:]]), minlength=len(tokenizer))
    first, second = counts.topk(2).indices.tolist()
    llama.generation_config.eos_token_id = [first, second]
    ending = HFModel(llama, tokenizer)
    assert ending.eos_ids == {first, second, tokenizer.eos_token_id}
    last_tokens = set()
    for before, after in zip(free, ending.sample(asked, temperature=1.0), strict=True):
        end = next((i for i, token in enumerate(before.token_ids) if token in ending.eos_ids), None)
        cut = before.token_ids if end is None else before.token_ids[: end + 1]
        assert after.token_ids == cut
        assert after.logprobs == pytest.approx(before.logprobs[: len(cut)], abs=FLOAT32)
        assert after.finish_reason == ("length" if end is None else "stop")
        last_tokens.add(after.token_ids[-1])
    assert {first, second} <= last_tokens


def test_a_truncated_answer_has_no_end_token(model: HFModel) -> None:
    for completion in model.sample(requests(12, max_new_tokens=(6,)), temperature=1.0):
        ended = completion.token_ids[-1] in model.eos_ids
        assert completion.finish_reason == ("stop" if ended else "length")
        assert ended or len(completion.token_ids) == 6
        assert not model.eos_ids & set(completion.token_ids[:-1])


def test_an_end_token_as_the_last_of_the_budget_is_a_stop(make_llama: Make, tokenizer: Any) -> None:
    llama = make_llama()
    (free,) = HFModel(llama, tokenizer).sample(requests(1, max_new_tokens=(5,)), temperature=1.0)
    assert len(set(free.token_ids)) > 1
    place = max(free.token_ids.index(t) for t in set(free.token_ids))
    llama.generation_config.eos_token_id = free.token_ids[place]
    asked = [replace(requests(1)[0], max_new_tokens=place + 1)]
    (ended,) = HFModel(llama, tokenizer).sample(asked, temperature=1.0)
    assert ended.token_ids == free.token_ids[: place + 1]
    assert ended.finish_reason == "stop"


def test_a_budget_of_zero_gives_an_empty_answer_beside_others(model: HFModel) -> None:
    asked = requests(4, max_new_tokens=(0, 3))
    completions = model.sample(asked, temperature=1.0)
    assert tokens(completions)[::2] == [((), "length")] * 2
    assert [len(c.token_ids) for c in completions[1::2]] == [3, 3]


def test_nothing_asked_gives_nothing(model: HFModel) -> None:
    assert model.sample([], temperature=1.0) == []
    assert model.score([]) == []


def test_a_model_without_any_end_token_is_refused(make_llama: Make, make_tokenizer: Make) -> None:
    llama, tokenizer = make_llama(eos_token_id=None), make_tokenizer()
    llama.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="end token"):
        HFModel(llama, tokenizer)


# ------------------------------------------------------------------------------------------------------------- greedy


def test_greedy_answers_equal_those_of_transformers(model64: HFModel) -> None:
    asked = requests(7, max_new_tokens=(25,))
    for request, completion in zip(asked, model64.sample(asked, temperature=0.0), strict=True):
        prompt = torch.tensor([request.prompt_ids])
        with torch.no_grad():
            theirs = model64.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=25
            )
        assert list(completion.token_ids) == theirs[0, prompt.shape[1] :].tolist()
        assert set(completion.logprobs) == {0.0}  # the likeliest token is certain at temperature 0


# ------------------------------------------------------------------------------------------------------------ scoring


def pairs(count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompts of 1 to 9 and responses of 0 to 12 tokens, all lengths mixed."""
    return [
        (r.prompt_ids, tuple((11 * i + 5 * j) % 106 for j in range((5 * i) % 13)))
        for i, r in enumerate(requests(count))
    ]


def test_scores_equal_a_hand_made_log_softmax(model: HFModel) -> None:
    asked = pairs(13)
    for (prompt, response), score in zip(asked, model.score(asked), strict=True):
        assert score == pytest.approx(reference(model, prompt, response), abs=FLOAT32)


def test_scores_do_not_depend_on_padding_order_or_batch(make_llama: Make, tokenizer: Any) -> None:
    llama = make_llama().double()
    asked = pairs(13)
    by_hand = [reference(HFModel(llama, tokenizer), *pair) for pair in asked]
    for batch_size in (1, 3, 256):
        engine = HFModel(llama, tokenizer, dtype=torch.float64, batch_size=batch_size)
        for score, want in zip(engine.score(asked), by_hand, strict=True):
            assert score == pytest.approx(want, abs=FLOAT64)
        backwards = engine.score(asked[::-1])[::-1]
        for score, want in zip(backwards, by_hand, strict=True):
            assert score == pytest.approx(want, abs=FLOAT64)


def test_only_response_tokens_reach_the_head_and_few_at_a_time(
    make_llama: Make, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # ms-swift #10097: logits of prompts and padding, all at once
    llama, asked = make_llama().double(), pairs(13)
    rows: list[int] = []

    def counted(hidden_NH: torch.Tensor, head: Any, **keywords: Any) -> torch.Tensor:
        rows.append(len(hidden_NH))
        return head_logits(hidden_NH, head, **keywords)

    monkeypatch.setattr(hf, "head_logits", counted)
    monkeypatch.setattr(hf, "default_chunk", lambda *_: 3)
    engine = HFModel(llama, tokenizer, dtype=torch.float64)
    scores = engine.score(asked)
    assert sum(rows) == sum(len(response) for _, response in asked)
    assert max(rows) == 3
    # A head that `Head` cannot say: the model makes the logits itself.
    other = HFModel(llama, tokenizer, dtype=torch.float64)
    monkeypatch.setattr(hf, "output_head", _refused)
    for score, own in zip(scores, other.score(asked), strict=True):
        assert score == pytest.approx(own, abs=FLOAT64)


def _refused(_: Any) -> Any:
    raise InputError("its logits are bent")


def test_a_response_of_one_token_and_an_empty_one_are_scored(model64: HFModel) -> None:
    (one,), none = model64.score([((5, 6), (7,)), ((5, 6), ())])
    assert one == pytest.approx(reference(model64, (5, 6), (7,))[0], abs=FLOAT64)
    assert none == []
    assert model64.score([((5, 6), ())]) == [[]]


def test_scores_of_all_next_tokens_sum_to_probability_one(model64: HFModel) -> None:
    scores = model64.score([((9, 2, 77), (token,)) for token in range(len(model64.tokenizer))])
    assert sum(torch.tensor(scores).double().exp().flatten().tolist()) == pytest.approx(1.0, abs=1e-6)


def test_a_later_token_does_not_change_the_score_of_an_earlier_one(model64: HFModel) -> None:
    one, other = model64.score([((1, 2, 3), (4, 5, 6, 7)), ((1, 2, 3), (4, 5, 99, 98))])
    assert one[:2] == pytest.approx(other[:2], abs=FLOAT64)
    assert abs(one[3] - other[3]) > 1e-3


def test_a_teacher_with_the_students_weights_gives_the_students_scores(make_llama: Make, tokenizer: Any) -> None:
    student, teacher = HFModel(make_llama(), tokenizer), HFModel(make_llama(), tokenizer)
    asked = requests(5)
    completions = student.sample(asked, temperature=1.0)
    scored = [(r.prompt_ids, c.token_ids) for r, c in zip(asked, completions, strict=True)]
    assert teacher.score(scored) == student.score(scored)


# ------------------------------------------------------------------------------------------------- padded embeddings


@pytest.fixture(scope="module")
def padded(make_llama: Make, tokenizer: Any) -> HFModel:
    """A model with 38 rows beyond its tokenizer, of which some win nearly every time."""
    llama = make_llama(vocab_size=len(tokenizer) + 38)
    with torch.no_grad():
        llama.lm_head.weight[len(tokenizer) :] *= 20
    return HFModel(llama, tokenizer)


def test_ids_beyond_the_tokenizer_are_never_sampled(padded: HFModel) -> None:
    asked = requests(16)
    with torch.no_grad():
        free = [padded.model(input_ids=torch.tensor([r.prompt_ids])).logits[0, -1].argmax().item() for r in asked]
    assert max(free) >= len(padded.tokenizer), "without the cut they would be the likeliest"
    for temperature in (0.0, 1.0):
        completions = padded.sample(asked, temperature=temperature)
        assert max(t for c in completions for t in c.token_ids) < len(padded.tokenizer)


def test_probabilities_of_a_padded_model_are_normalised_over_the_tokenizer(padded: HFModel) -> None:
    asked = requests(5)
    completions = padded.sample(asked, temperature=1.0)
    scores = padded.score([(r.prompt_ids, c.token_ids) for r, c in zip(asked, completions, strict=True)])
    for request, completion, score in zip(asked, completions, scores, strict=True):
        by_hand = reference(padded, request.prompt_ids, completion.token_ids)
        assert completion.logprobs == pytest.approx(by_hand, abs=FLOAT32)
        assert score == pytest.approx(by_hand, abs=FLOAT32)


# ------------------------------------------------------------------------------------------------------- from a folder


@pytest.fixture(scope="module")
def folder(make_llama: Make, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    llama = make_llama(attention_dropout=0.5)
    llama.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_a_trained_model_scores_without_dropout(folder: Path) -> None:
    trained, frozen = HFModel.load(str(folder), train=True), HFModel.load(str(folder))
    assert trained.model.training
    assert trained.score(pairs(6)) == frozen.score(pairs(6))


def test_gradient_checkpointing_does_not_change_what_is_sampled(folder: Path) -> None:
    trained, frozen = HFModel.load(str(folder), train=True), HFModel.load(str(folder))
    trained.model.gradient_checkpointing_enable()
    assert tokens(trained.sample(requests(4), temperature=1.0)) == tokens(frozen.sample(requests(4), temperature=1.0))
    assert trained.model.training


def test_a_saved_model_samples_and_scores_the_same(folder: Path, tmp_path: Path) -> None:
    before = HFModel.load(str(folder))
    before.save(tmp_path / "copy")
    after = HFModel.load(str(tmp_path / "copy"))
    assert after.score(pairs(6)) == before.score(pairs(6))
    assert after.sample(requests(4), temperature=0.7) == before.sample(requests(4), temperature=0.7)


def test_only_a_model_to_train_has_gradients(folder: Path) -> None:
    assert not any(p.requires_grad for p in HFModel.load(str(folder)).model.parameters())
    assert all(p.requires_grad for p in HFModel.load(str(folder), train=True).model.parameters())


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=str(tmp_path)):
        HFModel.load(str(tmp_path))


def test_pickled_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save(HFModel.load(str(folder)).model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=str(tmp_path)):
        HFModel.load(str(tmp_path))


def test_a_damaged_weights_file_is_named(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match=str(tmp_path)):
        HFModel.load(str(tmp_path))
