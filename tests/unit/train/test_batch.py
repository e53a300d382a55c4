from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.train.batch import MicroBatch, TrainSequence, cut

CPU = torch.device("cpu")


def sequence(
    name: str,
    *,
    prompt: int = 2,
    mask: Sequence[int] = (1, 1, 1),
    teacher: str = "a",
    weight: float = 1.0,
    streams: dict[str, Sequence[float]] | None = None,
) -> TrainSequence:
    ids = list(range(10, 10 + len(mask)))
    return TrainSequence(name, list(range(1, 1 + prompt)), ids, mask, teacher, weight, streams or {})


def batches(sequences: list[TrainSequence], *, pieces: int = 1, reduction: str = "token") -> list[MicroBatch]:
    return cut(sequences, reduction=reduction, num_micro_batches=pieces, pad_id=0, device=CPU)  # type: ignore[arg-type]


# Prompt length, response length, teacher.
ROWS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9), st.sampled_from("abc")), min_size=1, max_size=12)


def sequences_of(rows: list[tuple[int, int, str]]) -> list[TrainSequence]:
    return [sequence(f"s{i}", prompt=p, mask=[1] * r, teacher=t) for i, (p, r, t) in enumerate(rows)]


@given(ROWS, st.integers(1, 15))
def test_every_sequence_lands_in_one_micro_batch_of_its_own_teacher(
    rows: list[tuple[int, int, str]], pieces: int
) -> None:
    sequences = sequences_of(rows)
    found = batches(sequences, pieces=pieces)
    assert Counter(s.sample_id for b in found for s in b.sequences) == Counter(s.sample_id for s in sequences)
    assert all({s.teacher_id for s in b.sequences} == {b.teacher_id} for b in found)


@given(ROWS, st.integers(1, 15))
def test_as_many_micro_batches_come_out_as_asked_for_where_there_are_so_many_sequences(
    rows: list[tuple[int, int, str]], pieces: int
) -> None:
    found = batches(sequences_of(rows), pieces=pieces)
    assert len(found) >= min(pieces, len(rows))


@given(st.integers(1, 12))
def test_one_teacher_gives_as_many_micro_batches_as_asked_for(pieces: int) -> None:
    sequences = [sequence(f"s{i}", mask=[1] * (1 + i % 4)) for i in range(8)]
    assert len(batches(sequences, pieces=pieces)) == min(pieces, 8)


def test_loss_active_tokens_come_in_reading_order_with_their_streams_and_coefficients() -> None:
    long = sequence("long", prompt=1, mask=[1, 0, 1], weight=2.0, streams={"x": [0.5, 9.0, 0.25]})
    short = sequence("short", prompt=3, mask=[0, 1], streams={"x": [7.0, 0.125]})
    (batch,) = batches([long, short])
    order = [s.sample_id for s in batch.sequences]
    per_sequence = {"long": ([10, 12], [0.5, 0.25], [2 / 3] * 2), "short": ([11], [0.125], [1 / 3])}
    assert batch.tokens_N.tolist() == [t for name in order for t in per_sequence[name][0]]
    assert batch.streams["x"].tolist() == [x for name in order for x in per_sequence[name][1]]
    by_hand = [c for name in order for c in per_sequence[name][2]]
    assert batch.coefficients_N.tolist() == pytest.approx(by_hand, rel=1e-7)  # float32
    assert int(batch.active_BR.sum()) == 3


def test_coefficients_of_all_micro_batches_sum_to_the_weighted_share_of_each_teacher() -> None:
    sequences = [sequence(f"a{i}", mask=[1] * 2, teacher="a") for i in range(3)]
    sequences += [sequence(f"b{i}", mask=[1] * 10, teacher="b", weight=0.5) for i in range(1)]
    for pieces in (1, 2, 4):
        sums: Counter[str] = Counter()
        for batch in batches(sequences, pieces=pieces):
            sums[batch.teacher_id] += float(batch.coefficients_N.double().sum())
        assert dict(sums) == pytest.approx({"a": 6 / 16, "b": 0.5 * 10 / 16}, rel=1e-6)
        by_sequence: Counter[str] = Counter()
        for batch in batches(sequences, pieces=pieces, reduction="sequence"):
            by_sequence[batch.teacher_id] += float(batch.coefficients_N.double().sum())
        assert dict(by_sequence) == pytest.approx({"a": 3 / 4, "b": 0.5 * 1 / 4}, rel=1e-6)


def test_equal_objects_at_two_places_count_twice() -> None:
    one = sequence("s")
    total = sum(len(b.tokens_N) for b in batches([one, one]))
    coefficients = torch.cat([b.coefficients_N for b in batches([one, one])])
    assert total == 6
    assert coefficients.tolist() == pytest.approx([1 / 6] * 6, rel=1e-7)


def test_values_at_masked_positions_of_a_stream_go_nowhere() -> None:
    nan, inf = float("nan"), float("inf")
    (batch,) = batches([sequence("s", mask=[0, 1, 0], streams={"x": [nan, -1.5, inf]})])
    assert batch.streams["x"].tolist() == [-1.5]


@pytest.mark.parametrize("length", [2, 4])
def test_a_stream_of_the_wrong_length_names_the_sample(length: int) -> None:
    good = sequence("good", streams={"behavior_logprobs": [-1.0] * 3})
    bad = sequence("bad-7", streams={"behavior_logprobs": [-1.0] * length})
    with pytest.raises(ValueError, match=r"bad-7.*behavior_logprobs"):
        batches([good, bad])


@pytest.mark.parametrize("length", [2, 4])
def test_a_loss_mask_of_the_wrong_length_names_the_sample(length: int) -> None:
    # A shorter one would silently untrain the end, a longer one would count tokens that do not exist.
    bad = replace(sequence("bad-7"), loss_mask=[1] * length)
    with pytest.raises(ValueError, match=r"bad-7"):
        batches([sequence("good", mask=[1] * 5), bad])


def test_a_stream_that_only_some_sequences_have_names_the_sample() -> None:
    full, bare = sequence("full", streams={"teacher_logprobs": [-1.0] * 3}), sequence("bare-7")
    for rows in ([full, bare], [bare, full]):
        with pytest.raises(ValueError, match=r"teacher_logprobs"):
            batches(rows)


def test_a_response_of_one_token_stays_a_row() -> None:
    (batch,) = batches([sequence("s", mask=[1], streams={"x": [-2.0]})])
    assert batch.tokens_N.tolist() == [10]
    assert batch.streams["x"].tolist() == [-2.0]
    assert batch.coefficients_N.tolist() == [1.0]


def test_no_sequences_give_no_micro_batches() -> None:
    assert batches([]) == []
