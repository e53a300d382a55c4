"""Student against teacher at every sampled token, held against one unpadded sequence at a time in float64.

FLOAT32: logits reach about 20 here, and padding and batches sum in another order.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mopdctl.distill.overlap.compare import STREAMS, Room, Streams, compare
from mopdctl.distill.overlap.zero import zero_test
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError, MopdctlError
from mopdctl.records import Sample

FLOAT32 = 2e-4
K = 4
ROOM = Room()

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def student(make_llama: Make, tokenizer: Any) -> HFModel:
    return HFModel(make_llama(), tokenizer)


@pytest.fixture(scope="module")
def teacher(make_llama: Make, tokenizer: Any) -> HFModel:
    return HFModel(make_llama(seed=1), tokenizer)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Of uneven lengths, one of a single token; the third has what a tool said in the middle, the last in front."""
    shapes = [(3, [1, 1, 1]), (7, [1]), (2, [1, 0, 0, 1, 1, 1, 1]), (5, [1] * 11), (1, [0, 0, 1])]
    found = []
    for number, (prompt_length, mask) in enumerate(shapes):
        tokens = [(17 * number + 5 * i) % 97 for i in range(prompt_length + len(mask))]
        found.append(
            Sample(
                sample_id=f"s{number}",
                prompt_id=str(number),
                group_id=str(number),
                generation_index=0,
                domain="math",
                teacher_id="",
                policy_version_min=0,
                policy_version_max=0,
                tokens=np.array(tokens, np.int32),
                prompt_length=prompt_length,
                loss_mask=np.array([0] * prompt_length + mask, np.bool_),
                behavior_logprobs=np.zeros(sum(mask), np.float32),
                finish_reason="stop",
            )
        )
    return found


def by_hand(student: HFModel, teacher: HFModel, sample: Sample) -> list[dict[str, float]]:
    """In Python floats. Logits at t - 1 predict the token at t (eval-protocol #457, maxtext #2103)."""
    rows = []
    logprobs = []
    for model in (student, teacher):
        wide = copy.deepcopy(model.model).double()
        with torch.no_grad():
            logits = wide(input_ids=torch.from_numpy(sample.tokens).long().unsqueeze(0)).logits[0, :, :106]
        logprobs.append(torch.log_softmax(logits, dim=-1).tolist())
    for t in np.flatnonzero(sample.loss_mask).tolist():
        p, q = logprobs[0][t - 1], logprobs[1][t - 1]
        top_p, top_q = (set(sorted(range(106), key=lambda v, x=x: -x[v])[:K]) for x in (p, q))
        rows.append(
            {
                "top_k_overlap": len(top_p & top_q) / K,
                "student_mass": math.fsum(math.exp(p[v]) for v in top_q),
                "teacher_mass": math.fsum(math.exp(q[v]) for v in top_p),
                "kl_reverse_nats": math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)),
                "kl_forward_nats": math.fsum(math.exp(b) * (b - a) for a, b in zip(p, q, strict=True)),
                "student_entropy_nats": -math.fsum(math.exp(a) * a for a in p),
                "teacher_entropy_nats": -math.fsum(math.exp(b) * b for b in q),
                "student_logprobs": p[sample.tokens[t]],
                "teacher_logprobs": q[sample.tokens[t]],
            }
        )
    return rows


def assert_close(one: list[Streams], other: list[Streams]) -> None:
    for a, b in zip(one, other, strict=True):
        for name in STREAMS:
            np.testing.assert_allclose(a[name], b[name], atol=FLOAT32, rtol=FLOAT32)


def test_every_stream_equals_its_value_by_hand(student: HFModel, teacher: HFModel, samples: list[Sample]) -> None:
    found = compare(student, teacher, samples, top_k=K, room=ROOM)
    for sample, streams in zip(samples, found, strict=True):
        expected = by_hand(student, teacher, sample)
        assert set(streams) == set(STREAMS)
        for name in STREAMS:
            assert streams[name].tolist() == pytest.approx([row[name] for row in expected], abs=FLOAT32, rel=FLOAT32)


@pytest.mark.parametrize("room", [Room(batch_tokens=1), Room(logit_rows=1), Room(batch_tokens=30, logit_rows=3)])
def test_measures_do_not_depend_on_batches(
    student: HFModel, teacher: HFModel, samples: list[Sample], room: Room
) -> None:  # TRL #6191, optipfair #34: neither padding nor its side counts
    plain = compare(student, teacher, samples, top_k=K, room=ROOM)
    assert_close(plain, compare(student, teacher, samples, top_k=K, room=room))
    backwards = compare(student, teacher, samples[::-1], top_k=K, room=room)
    assert_close(plain, backwards[::-1])


def test_a_batch_is_never_larger_than_its_room(
    student: HFModel, teacher: HFModel, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    forward = HFModel.hidden_states

    def watched(self: HFModel, pairs: Any, masks: Any) -> Any:
        sizes.append(len(pairs) * (max(len(p) for p, _ in pairs) + max(len(r) for _, r in pairs)))
        return forward(self, pairs, masks)

    monkeypatch.setattr(HFModel, "hidden_states", watched)
    compare(student, teacher, samples, top_k=K, room=Room(batch_tokens=30))
    assert len(sizes) > 2
    assert max(sizes) <= 30


def test_the_student_against_itself_is_zero_to_the_bit(student: HFModel, samples: list[Sample]) -> None:
    same = HFModel(copy.deepcopy(student.model), student.tokenizer)
    for streams in compare(student, same, samples, top_k=K, room=ROOM):
        assert (streams["top_k_overlap"] == 1).all()
        assert (streams["student_mass"] == streams["teacher_mass"]).all()
        assert (streams["kl_reverse_nats"] == 0).all()
        assert (streams["kl_forward_nats"] == 0).all()
        assert (streams["student_logprobs"] == streams["teacher_logprobs"]).all()


def test_a_teacher_with_permuted_outputs_hardly_overlaps(student: HFModel, samples: list[Sample]) -> None:
    model = copy.deepcopy(student.model)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head.copy_(head[torch.randperm(len(head), generator=torch.Generator().manual_seed(0))])
    streams = compare(student, HFModel(model, student.tokenizer), samples, top_k=K, room=ROOM)
    found = {name: np.concatenate([one[name] for one in streams]).mean() for name in STREAMS}
    assert found["top_k_overlap"] < 0.15
    assert found["student_mass"] < 0.25
    assert found["kl_reverse_nats"] > 1


def test_a_teacher_of_negated_logits_shares_nothing(student: HFModel, samples: list[Sample]) -> None:
    model = copy.deepcopy(student.model)
    with torch.no_grad():
        model.get_output_embeddings().weight.neg_()
    for streams in compare(student, HFModel(model, student.tokenizer), samples, top_k=50, room=ROOM):
        assert (streams["top_k_overlap"] == 0).all()


def test_padded_embedding_rows_have_no_mass(
    student: HFModel, make_llama: Make, tokenizer: Any, samples: list[Sample]
) -> None:  # TRL #2215, #3028, #6252
    padded, own = make_llama(vocab_size=128), dict(student.model.named_parameters())
    with torch.no_grad():
        for name, weight in padded.named_parameters():
            weight[: len(own[name])].copy_(own[name])
            weight[len(own[name]) :].fill_(50.0)
    same = compare(student, HFModel(padded, tokenizer), samples, top_k=K, room=ROOM)
    assert all((streams["top_k_overlap"] == 1).all() for streams in same)
    assert max(float(np.abs(streams["kl_reverse_nats"]).max()) for streams in same) < FLOAT32


def test_an_answer_longer_than_the_teachers_context_is_refused(
    student: HFModel, make_llama: Make, tokenizer: Any, samples: list[Sample]
) -> None:
    short = HFModel(make_llama(max_position_embeddings=12), tokenizer)
    with pytest.raises(InputError, match="sample s3: 16 tokens, but the teacher's context has 12"):
        compare(student, short, samples, top_k=K, room=ROOM)


def test_a_teacher_that_gives_no_number_is_named_by_sample(student: HFModel, samples: list[Sample]) -> None:
    broken = HFModel(copy.deepcopy(student.model), student.tokenizer)
    assert broken.head is not None
    with torch.no_grad():
        broken.model.get_output_embeddings().weight[3].fill_(math.nan)
    with pytest.raises(MopdctlError, match=r"sample s\d: \w+ of sampled token 0 is nan"):
        compare(student, broken, samples, top_k=K, room=ROOM)


# ----------------------------------------------------------------------------------------------------------- zero test


def test_the_zero_test_of_a_student_against_itself_is_exact(student: HFModel, samples: list[Sample]) -> None:
    found = zero_test(student, samples, {}, top_k=K, room=ROOM)
    assert (found.against, found.exact, found.kl_nats, found.advantage_nats, found.top_k_overlap) == (
        "itself",
        True,
        0.0,
        0.0,
        1.0,
    )
    assert found.tokens == sum(int(sample.loss_mask.sum()) for sample in samples)
    assert zero_test(student, samples, {}, top_k=K, room=Room(batch_tokens=1)).tokens == 3  # the first answer


@pytest.mark.parametrize(
    ("stream", "value"), [("kl_reverse_nats", 1e-6), ("kl_forward_nats", 1e-6), ("teacher_logprobs", -1.001)]
)
def test_the_zero_test_fails_on_the_least_difference(student: HFModel, stream: str, value: float) -> None:
    streams = {name: np.zeros(2, np.float32) for name in STREAMS}
    streams |= {"top_k_overlap": np.ones(2, np.float32)}
    streams |= {name: np.full(2, -1, np.float32) for name in ("student_logprobs", "teacher_logprobs")}
    good = {"self": [streams]}
    assert zero_test(student, [], good, top_k=K, room=ROOM).exact
    bad = streams | {stream: streams[stream].copy()}
    bad[stream][1] = value
    found = zero_test(student, [], {"self": [bad]}, top_k=K, room=ROOM)
    assert (found.against, found.exact) == ("self", False)
