"""Discriminators and what the student is taught by them: scores, pay, learning, state, and one denominator each."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from mopdctl.config.blackbox import DiscriminatorConfig
from mopdctl.config.distill import DistillTrainConfig
from mopdctl.distill.blackbox.book import AnswerBook
from mopdctl.distill.blackbox.discriminator import Discriminator, discriminator_optimizer, learn, score
from mopdctl.distill.blackbox.discriminators import Discriminators
from mopdctl.distill.blackbox.loss import black_box_loss
from mopdctl.distill.blackbox.sequences import ANSWERS, DISCRIMINATOR, sequences_for
from mopdctl.engines.hf import HFModel
from mopdctl.errors import MopdctlError
from mopdctl.objective.group import group_advantages
from mopdctl.records import Sample
from mopdctl.train.batch import MicroBatch, TrainSequence, cut
from mopdctl.train.optimizer import Optimizers
from mopdctl.train.step import accumulate

TRAIN = DistillTrainConfig(steps=1, samples_per_prompt=2, sampling_batch_size=4)
END = 104


def sample(
    name: str, response: Sequence[int], *, prompt: Sequence[int] = (7, 8, 9), alias: str = "api", group: str = "p/0"
) -> Sample:
    return Sample(
        sample_id=name,
        prompt_id="p",
        group_id=group,
        generation_index=0,
        domain="math",
        teacher_id=alias,
        policy_version_min=0,
        policy_version_max=0,
        tokens=np.array([*prompt, *response], np.int32),
        prompt_length=len(prompt),
        loss_mask=np.array([False] * len(prompt) + [True] * len(response)),
        behavior_logprobs=np.full(len(response), -2.0, np.float32),
        finish_reason="stop",
    )


def book(*answers: Sample, alias: str = "api") -> AnswerBook:
    return AnswerBook(alias, {"p": answers}, {})


@pytest.fixture(scope="module")
def make_student(make_llama: Callable[..., Any], tokenizer: Any) -> Callable[..., HFModel]:
    def make(**changes: Any) -> HFModel:
        return HFModel(make_llama(**changes).train(), tokenizer)

    return make


@pytest.fixture(scope="module")
def student(make_student: Callable[..., HFModel]) -> HFModel:
    """Nothing may train it."""
    return make_student()


@pytest.fixture
def told_apart(student: HFModel) -> Discriminator:
    """A discriminator with a head that is not zero."""
    model = Discriminator(student)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.head.weight.normal_()
    return model


def with_head(found: Discriminators, alias: str = "api") -> Discriminators:
    """Gives a discriminator an opinion, as it would have after some steps."""
    state = found.state()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        state[f"blackbox/{alias}/weights/head.weight"].normal_()
    return found


# ------------------------------------------------------------------------------------------------------------- scores


def test_a_score_is_the_head_on_the_hidden_state_of_the_last_token(student: HFModel, told_apart: Discriminator) -> None:
    samples = [sample("a", [20, 21, END]), sample("b", [30], prompt=(5,)), sample("c", [40, 41, 42, 43, END])]
    found = score(told_apart, samples, batch_size=8)
    for one, value in zip(samples, found, strict=True):
        ids = torch.from_numpy(one.tokens.astype(np.int64)).unsqueeze(0)  # alone, without any padding
        hidden_TH = student.model.model(input_ids=ids).last_hidden_state[0]
        assert value == pytest.approx(float((hidden_TH[-1] @ told_apart.head.weight[0]).detach()), abs=1e-4)


def test_padding_order_and_batches_leave_scores_as_they_are(told_apart: Discriminator) -> None:
    samples = [sample(str(i), [20 + i] * (1 + i % 4), prompt=[9] * (1 + i % 3)) for i in range(7)]
    whole = score(told_apart, samples, batch_size=8)
    assert score(told_apart, samples, batch_size=2) == pytest.approx(whole, abs=1e-4)
    assert score(told_apart, samples[::-1], batch_size=3)[::-1] == pytest.approx(whole, abs=1e-4)
    assert len({round(value, 3) for value in whole}) == 7


def test_where_prompt_and_answer_meet_is_seen_by_the_scores_of_equal_tokens(told_apart: Discriminator) -> None:
    same = [sample("a", [20, 21]), sample("b", [20, 21]), sample("c", [21], prompt=(7, 8, 9, 20))]
    first, second, third = score(told_apart, same, batch_size=1)
    assert first == second
    assert third == pytest.approx(first, abs=1e-4)  # it is the same text, and is scored as such


def test_an_untrained_discriminator_tells_nothing_apart(student: HFModel) -> None:
    assert score(Discriminator(student), [sample("a", [20]), sample("b", [30, END])], batch_size=8) == [0.0, 0.0]


def test_it_is_a_copy_that_leaves_the_student_alone(make_student: Callable[..., HFModel]) -> None:
    student = make_student()
    before = {name: p.detach().clone() for name, p in student.model.named_parameters()}
    model = Discriminator(student)
    learn_once(model, [(sample("t", [20]), sample("s", [30]))], steps=3)
    assert all(torch.equal(before[name], p) for name, p in student.model.named_parameters())
    assert all(p.grad is None for p in student.model.parameters())
    assert any(not torch.equal(before[f"model.{name}"], p) for name, p in model.backbone.named_parameters())


# ----------------------------------------------------------------------------------------------------------- learning


def learn_once(
    model: Discriminator, pairs: list[tuple[Sample, Sample]], *, steps: int = 1, pieces: int = 1, rate: float = 1e-3
) -> list[Any]:
    optimizers = discriminator_optimizer(model, rate, TRAIN)
    return [
        learn(model, optimizers, pairs, learning_rate=rate, max_grad_norm=1.0, micro_batches=pieces, name="api")
        for _ in range(steps)
    ]


def test_it_learns_a_planted_difference(student: HFModel) -> None:
    # The teacher ends with 50, the student with 60, whatever stands before.
    generator = np.random.default_rng(0)

    def planted(last: int) -> Sample:
        length = int(generator.integers(1, 5))
        return sample(str(generator.random()), [*generator.integers(10, 40, length).tolist(), last])

    model = Discriminator(student)
    told = learn_once(model, [(planted(50), planted(60)) for _ in range(8)], steps=15, rate=3e-3)
    assert (told[0].margin, told[0].accuracy, told[0].reward) == (0.0, 0.5, 0.0)
    assert told[0].loss == pytest.approx(np.log(2))
    assert told[-1].accuracy == 1.0
    fresh = [(planted(50), planted(60)) for _ in range(8)]
    teacher, own = (score(model, [pair[i] for pair in fresh], batch_size=8) for i in (0, 1))
    assert min(teacher) > max(own)


def test_equal_answers_have_no_margin_and_move_nothing(told_apart: Discriminator) -> None:
    before = {name: p.detach().clone() for name, p in told_apart.named_parameters()}
    optimizers = discriminator_optimizer(told_apart, 1e-3, TRAIN)
    pairs = [(sample("t", [20, END]), sample("s", [20, END])), (sample("t", [30]), sample("u", [30]))]
    options: dict[str, Any] = {"learning_rate": 1e-3, "max_grad_norm": 1.0, "micro_batches": 1, "name": "api"}
    learn(told_apart, optimizers, [(sample("t", [40]), sample("s", [50]))], **options)  # moments that would go on
    before = {name: p.detach().clone() for name, p in told_apart.named_parameters()}
    told = learn(told_apart, optimizers, pairs, **options)
    assert (told.margin, told.accuracy, told.pairs) == (0.0, 0.5, 2)
    assert told.loss == pytest.approx(np.log(2))
    assert all(torch.equal(before[name], p) for name, p in told_apart.named_parameters())


def test_pieces_change_neither_figures_nor_gradient(student: HFModel) -> None:
    # TRL #6006: the loss is the mean over the step's pairs, not over those of a micro-batch
    pairs = [(sample("t", [20] * (1 + i)), sample(f"s{i}", [30 + i] * (1 + i % 3))) for i in range(5)]
    found = []
    for pieces in (1, 2, 9):
        model = Discriminator(student)
        torch.nn.init.constant_(model.head.weight, 0.1)
        before = model.head.weight.detach().clone()
        descent = Optimizers([torch.optim.SGD(model.parameters(), lr=1.0)])  # its step is the gradient itself
        told = learn(model, descent, pairs, learning_rate=1.0, max_grad_norm=1e9, micro_batches=pieces, name="api")
        found.append((told, before - model.head.weight.detach()))
    for told, gradient_1H in found[1:]:
        assert told.loss == pytest.approx(found[0][0].loss, abs=1e-5)
        assert told.pairs == 5
        torch.testing.assert_close(gradient_1H, found[0][1], atol=1e-5, rtol=1e-3)
    assert float(found[0][1].norm()) > 0.1


def test_a_step_without_pairs_has_no_figures(told_apart: Discriminator) -> None:
    (told,) = learn_once(told_apart, [])
    assert (told.reward, told.margin, told.accuracy, told.loss, told.pairs) == (None, None, None, None, 0)


def test_a_gradient_that_is_no_number_stops_the_run(told_apart: Discriminator) -> None:
    torch.nn.init.constant_(told_apart.head.weight, float("nan"))
    with pytest.raises(MopdctlError, match="discriminator of 'api': the gradient's norm is nan"):
        learn_once(told_apart, [(sample("t", [20]), sample("s", [30]))])


# ---------------------------------------------------------------------------------------------------------------- pay


def discriminators(student: HFModel, *answers: Sample, **settings: Any) -> Discriminators:
    config = DiscriminatorConfig(**settings)
    return Discriminators(student, {"api": config}, {"api": book(*answers)}, TRAIN)


SAMPLES = [
    sample("a", [20, END]),
    sample("b", [30, 31]),
    sample("c", [20, END]),
    sample("d", [40], group="q/0"),
    sample("e", [41], group="q/0"),
    sample("other", [20], alias="scored"),
]


def test_advantages_are_those_of_the_scores_within_each_group(student: HFModel) -> None:
    found = with_head(discriminators(student, sample("t", [50, END]), baseline="leave_one_out", scale="none"))
    advantages = found.advantages(SAMPLES, turn=0)
    assert sorted(advantages) == ["a", "b", "c", "d", "e"]
    (model,) = found._models.values()
    scores = score(model, SAMPLES, batch_size=8)
    for members in ([0, 1, 2], [3, 4]):
        expected = group_advantages([scores[i] for i in members], baseline="leave_one_out", scale="none")
        assert [advantages[SAMPLES[i].sample_id] for i in members] == pytest.approx(expected, abs=1e-4)
    assert advantages["a"] == advantages["c"] != advantages["b"]


def test_equal_answers_of_a_group_have_exactly_no_advantage(student: HFModel) -> None:
    found = with_head(discriminators(student, sample("t", [50, END])))
    same = [sample(name, [20, 21, END]) for name in "abcde"]
    assert set(found.advantages(same, turn=0).values()) == {0.0}


def test_the_bound_counts_from_the_teachers_answer_of_the_turn(student: HFModel) -> None:
    answers = [sample("t0", [50, END]), sample("t1", [60, 61])]
    free = with_head(discriminators(student, *answers))
    (model,) = free._models.values()
    scores = dict(zip("abcde", score(model, SAMPLES[:5], batch_size=8), strict=True))
    for turn, answer in enumerate(answers):
        (own,) = score(model, [answer], batch_size=1)
        expected = {name: value - own for name, value in scores.items()}
        assert free.rewards(SAMPLES, turn=turn) == pytest.approx(expected, abs=1e-4)
    bounded = with_head(discriminators(student, *answers, reward_clip=0.5)).rewards(SAMPLES, turn=0)
    assert bounded == pytest.approx(
        {n: min(max(v, -0.5), 0.5) for n, v in free.rewards(SAMPLES, turn=0).items()}, abs=1e-4
    )
    assert max(map(abs, bounded.values())) == 0.5


def test_figures_are_kept_by_alias(student: HFModel) -> None:
    config = DiscriminatorConfig(learning_rate=1e-3)
    answer = sample("t", [50, END])
    books = {"api": book(answer), "idle": book(answer, alias="idle"), "web": book(sample("u", [21]), alias="web")}
    found = Discriminators(student, dict.fromkeys(books, config), books, TRAIN)
    metrics = found.train([*SAMPLES, sample("w", [20], alias="web")], turn=0)
    assert {name: sorted(by_alias) for name, by_alias in metrics.items()} == {
        f"blackbox/{figure}": ["api", "web"] for figure in ("reward", "margin", "accuracy", "loss")
    }
    again = found.train([*SAMPLES, sample("w", [20], alias="web")], turn=0)
    assert again["blackbox/margin"]["api"] > 0 == metrics["blackbox/margin"]["api"]
    assert again["blackbox/loss"]["web"] < metrics["blackbox/loss"]["web"]
    # Each is told apart from its own teacher.
    same = found.train([sample("w", [21], alias="web")], turn=0)
    assert same["blackbox/margin"] == {"web": 0.0}


def test_what_was_saved_goes_on_to_the_bit(student: HFModel) -> None:
    answer = sample("t", [50, END])
    straight = discriminators(student, answer, learning_rate=1e-3)
    for _ in range(2):
        straight.train(SAMPLES, turn=0)
    saved = load(save({name: tensor.contiguous().clone() for name, tensor in straight.state().items()}))
    resumed = discriminators(student, answer, learning_rate=1e-3)
    resumed.load_state(saved | {"model.layers.0.weight": torch.zeros(1)})  # the run keeps other tensors beside it
    assert resumed.advantages(SAMPLES, turn=0) == straight.advantages(SAMPLES, turn=0)
    assert resumed.train(SAMPLES, turn=0) == straight.train(SAMPLES, turn=0)
    assert resumed.state().keys() == straight.state().keys()
    assert all(torch.equal(tensor, resumed.state()[name]) for name, tensor in straight.state().items())


def test_a_state_that_lacks_weights_is_refused(student: HFModel) -> None:
    found = discriminators(student, sample("t", [50]))
    with pytest.raises(ValueError, match="discriminator: weights of another model"):
        found.load_state({})


def test_over_an_adapter_only_a_copy_of_it_and_the_head_are_trained(make_student: Callable[..., HFModel]) -> None:
    from peft import LoraConfig

    from mopdctl.engines.adapters import SharedBase

    student = SharedBase(make_student()).train(LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    found = discriminators(student, sample("t", [50, END]), learning_rate=1e-2)
    before = {name: tensor.clone() for name, tensor in found.state().items()}
    assert all(".lora_" in name or name.endswith("head.weight") for name in before)
    own = student.score([([7, 8], [20, 21])])
    for _ in range(3):
        metrics = found.train(SAMPLES, turn=0)
    assert metrics["blackbox/margin"]["api"] > 0
    assert all(not torch.equal(tensor, found.state()[name]) for name, tensor in before.items())
    assert student.score([([7, 8], [20, 21])]) == own
    resumed = discriminators(student, sample("t", [50, END]), learning_rate=1e-2)
    resumed.load_state({name: tensor.clone() for name, tensor in found.state().items()})
    assert resumed.rewards(SAMPLES, turn=0) == found.rewards(SAMPLES, turn=0)


# ---------------------------------------------------------------------------------------------------------- sequences


def scored(name: str, tokens: Sequence[int]) -> TrainSequence:
    """A sequence of a teacher with log-probabilities, as other parts of the step make them."""
    streams: dict[str, Sequence[float]] = {
        "behavior_logprobs": [-1.0] * len(tokens),
        "teacher_logprobs": [-1.0] * len(tokens),
    }
    return TrainSequence(name, [1], tokens, [1] * len(tokens), "scored", 1.0, streams)


def batches(sequences: list[TrainSequence]) -> list[MicroBatch]:
    return cut(sequences, reduction="token", num_micro_batches=1, pad_id=0, device=torch.device("cpu"))


def taught(student: HFModel, *, step: int, warm_up: int = 0, drawn: int = 1) -> list[TrainSequence]:
    answers = [sample("t0", [50, 51, END]), sample("t1", [60])]
    books = {"api": book(*answers), "texts": book(*answers, alias="texts")}
    found = with_head(
        Discriminators(student, {"api": DiscriminatorConfig(warm_up_steps=warm_up)}, {"api": books["api"]}, TRAIN)
    )
    pairs = [("api", "p"), *[("texts", "p")] * drawn]
    weights = {"api": 2.0, "texts": 0.5}
    return sequences_for(pairs, SAMPLES[:3], books, found, step=step, turn=1, weights=weights)


def test_answers_take_turns_and_each_loss_has_its_name(student: HFModel) -> None:
    found = taught(student, step=0, drawn=2)
    texts = [s for s in found if s.component == ANSWERS]
    assert [(s.teacher_id, s.response_ids, s.loss_mask, s.weight) for s in texts] == [
        ("texts", [60], [1], 0.5),
        ("texts", [50, 51, END], [1, 1, 1], 0.5),
    ]
    assert len({s.sample_id for s in texts}) == 2
    paid = [s for s in found if s.component == DISCRIMINATOR]
    assert [(s.sample_id, s.teacher_id, s.weight) for s in paid] == [(n, "api", 2.0) for n in "abc"]
    for one in paid:
        assert len(set(one.streams["advantages"])) == 1
        assert one.streams["behavior_logprobs"] == [-2.0] * len(one.response_ids)


def test_while_a_discriminator_warms_up_the_student_learns_from_the_answers(student: HFModel) -> None:
    warming = [taught(student, step=step, warm_up=2) for step in range(3)]
    for step in (0, 1):
        assert [(s.teacher_id, s.component) for s in warming[step]] == [("api", ANSWERS), ("texts", ANSWERS)]
    assert {(s.teacher_id, s.component) for s in warming[2]} == {("api", DISCRIMINATOR), ("texts", ANSWERS)}


def test_what_is_added_to_one_component_changes_no_other(student: HFModel) -> None:
    # prime-rl: reward, likelihood and KL terms with one denominator dilute each other
    def coefficients(*sequences: TrainSequence) -> dict[str, float]:
        found: dict[str, set[float]] = {}
        for batch in batches(list(sequences)):
            found.setdefault(batch.component, set()).update(batch.coefficients_N.tolist())
        return {component: value for component, (value,) in found.items()}

    alone = taught(student, step=0)
    before = coefficients(*alone, scored("s", [1, 2]))
    assert before == pytest.approx({ANSWERS: 0.5 / 1, DISCRIMINATOR: 2 / 6, "": 1 / 2})
    more_scored = coefficients(*alone, scored("s", [1, 2]), scored("u", [3] * 30))
    assert more_scored == before | {"": 1 / 32}
    more_answers = coefficients(*taught(student, step=0, drawn=3), scored("s", [1, 2]))
    assert more_answers == pytest.approx(before | {ANSWERS: 0.5 / 5})


def gradient(student: HFModel, sequences: list[TrainSequence]) -> tuple[dict[str, Tensor], Any]:
    student.model.zero_grad()
    result = accumulate(student, batches(sequences), black_box_loss(TRAIN))
    found = {n: p.grad.clone() for n, p in student.model.named_parameters() if p.grad is not None}
    student.model.zero_grad()
    return found, result


def test_answers_are_trained_by_their_mean_negative_log_likelihood(student: HFModel) -> None:
    texts = [s for s in taught(student, step=0, drawn=2) if s.component == ANSWERS]
    found, result = gradient(student, texts)
    total = torch.zeros(())
    for sequence in texts:
        ids = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
        logprobs = student.model(ids).logits[0, :, : student.vocab_size].log_softmax(-1)
        first = len(sequence.prompt_ids) - 1
        for place, token in enumerate(sequence.response_ids):
            total = total - logprobs[first + place, token]
    loss = 0.5 * total / 4  # lambda over the four loss tokens
    loss.backward()
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert result.means["blackbox/nll_nats"] == {"texts": pytest.approx(float(total.detach()) / 4, rel=1e-5)}
    for name, parameter in student.model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-4)
    student.model.zero_grad()


def test_pay_is_a_policy_gradient_with_the_correction_of_all_others(student: HFModel) -> None:
    paid = [s for s in taught(student, step=0) if s.component == DISCRIMINATOR]
    # learner over sampler: inside the band [0.5, 5], above it, below it
    own = student.score([(s.prompt_ids, s.response_ids) for s in paid])
    shifts = ([0.0, 2.0], [0.3, -0.9], [-0.2, 1.0])
    for sequence, row, shift in zip(paid, own, shifts, strict=True):
        sequence.streams["behavior_logprobs"] = [value - by for value, by in zip(row, shift, strict=True)]
    found, result = gradient(student, paid)
    total, kept = torch.zeros(()), 0
    for sequence in paid:
        ids = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
        logprobs = student.model(ids).logits[0, :, : student.vocab_size].log_softmax(-1)
        first = len(sequence.prompt_ids) - 1
        for place, token in enumerate(sequence.response_ids):
            logprob = logprobs[first + place, token]
            ratio = float((logprob.detach() - sequence.streams["behavior_logprobs"][place]).exp())
            inside = TRAIN.correction_low <= ratio <= TRAIN.correction_high
            kept += inside
            if inside:
                total = total - ratio * sequence.streams["advantages"][place] * logprob
    (2.0 * total / 6).backward()
    assert kept == 4
    assert result.means["policy/kept_fraction"] == {"api": pytest.approx(kept / 6)}
    for name, parameter in student.model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-3)
    student.model.zero_grad()
