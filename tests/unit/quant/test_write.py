"""Safetensors files filled in any order: what a reader finds, how they are cut, and what a journal lets a run skip."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mopdctl.engines.weights import DTYPES
from mopdctl.quant.journal import Journal
from mopdctl.quant.write import Parts, Stored, index, lay_out

TENSORS = {
    "codes": torch.arange(12, dtype=torch.uint8).view(3, 4),
    "scale": torch.tensor([448.0, 1.0, 2.0**-9]).to(torch.float8_e4m3fn),
    "number": torch.tensor(0.5),
    "divisor": torch.tensor([1.25]),
    "kept": torch.randn(5, 3).bfloat16(),
    "none": torch.zeros(0, 4),
}
STORED = {name: Stored(tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()}


def fill(parts: Parts) -> dict[str, str]:
    return {name: parts.write(name, [TENSORS[name]]) for name in reversed(TENSORS)}


def test_a_reader_finds_every_tensor_as_it_was(tmp_path: Path) -> None:
    parts = Parts(tmp_path, STORED, max_bytes=1000)
    fill(parts)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_pieces_of_rows_give_the_bytes_and_the_digest_of_the_whole(tmp_path: Path) -> None:
    one, other = Parts(tmp_path / "a", STORED, max_bytes=1000), Parts(tmp_path / "b", STORED, max_bytes=1000)
    digests = fill(one)
    assert other.write("kept", TENSORS["kept"].split(2)) == digests["kept"] == other.digest("kept")
    assert other.digest("codes") != digests["codes"]


def test_every_tensor_begins_where_its_dtype_may() -> None:
    shard = lay_out(STORED, max_bytes=1000)[0]
    assert all(start % STORED[name].dtype.itemsize == 0 for name, start in shard.starts.items())


def test_files_hold_at_most_so_many_bytes_or_one_tensor() -> None:
    tensors = {f"t{n}": Stored(torch.uint8, (size,)) for n, size in enumerate([60, 30, 30, 200, 10])}
    shards = lay_out(tensors, max_bytes=100)
    assert [list(shard.starts) for shard in shards] == [["t0", "t1"], ["t2"], ["t3"], ["t4"]]
    assert [shard.file for shard in shards][:2] == [
        "model-00001-of-00004.safetensors",
        "model-00002-of-00004.safetensors",
    ]
    assert index(shards, tensors) == {
        "metadata": {"total_size": 330},
        "weight_map": {name: shard.file for shard in shards for name in shard.starts},
    }


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3, 4), torch.zeros(3, 5, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8)]
)
def test_a_tensor_that_does_not_fit_its_place_is_an_error(wrong: torch.Tensor, tmp_path: Path) -> None:
    parts = Parts(tmp_path, STORED, max_bytes=1000)
    with pytest.raises(AssertionError, match="codes"):
        parts.write("codes", [wrong])


def test_what_is_there_stays_when_the_files_are_opened_again(tmp_path: Path) -> None:
    digests = fill(Parts(tmp_path, STORED, max_bytes=1000))
    again = Parts(tmp_path, STORED, max_bytes=1000)
    assert {name: again.digest(name) for name in TENSORS} == digests


def test_every_dtype_that_can_be_read_can_be_written(tmp_path: Path) -> None:
    stored = {name: Stored(dtype, (2, 3)) for name, dtype in DTYPES.items()}
    parts = Parts(tmp_path, stored, max_bytes=1000)
    for name, dtype in DTYPES.items():
        parts.write(name, [torch.ones(2, 3).to(dtype)])
    found = parts.stored()
    assert all(bool((found.tensor(name).float() == 1).all()) for name in DTYPES)
    assert all(found.rows(name, 1, 2).dtype == dtype for name, dtype in DTYPES.items())


# ------------------------------------------------------------------------------------------------------------- journal


def journal_with(parts: Parts, path: Path) -> dict[str, str]:
    digests, journal = fill(parts), Journal(path, parts)
    journal.add("a", {"codes": digests["codes"], "scale": digests["scale"]}, {"relative_mse": 0.5})
    journal.add("kept", {"kept": digests["kept"]}, {})
    journal.close()
    return digests


def test_a_journal_gives_back_what_was_added(tmp_path: Path) -> None:
    parts = Parts(tmp_path, STORED, max_bytes=1000)
    journal_with(parts, tmp_path / "journal.jsonl")
    again = Journal(tmp_path / "journal.jsonl", parts)
    assert list(again.entries) == ["a", "kept"]
    assert again.entries["a"]["statistics"] == {"relative_mse": 0.5}


def test_a_line_that_a_kill_cut_short_is_forgotten_and_later_lines_follow_whole_ones(tmp_path: Path) -> None:
    parts = Parts(tmp_path, STORED, max_bytes=1000)
    digests = journal_with(parts, tmp_path / "journal.jsonl")
    text = (tmp_path / "journal.jsonl").read_bytes()
    (tmp_path / "journal.jsonl").write_bytes(text[:-9])
    again = Journal(tmp_path / "journal.jsonl", parts)
    assert list(again.entries) == ["a"]
    again.add("kept", {"kept": digests["kept"]}, {})
    again.close()
    assert (tmp_path / "journal.jsonl").read_bytes() == text


def test_a_line_whose_bytes_were_lost_is_forgotten(tmp_path: Path) -> None:
    parts = Parts(tmp_path, STORED, max_bytes=1000)
    journal_with(parts, tmp_path / "journal.jsonl")
    parts.write("scale", [torch.zeros(3).to(torch.float8_e4m3fn)])
    assert list(Journal(tmp_path / "journal.jsonl", parts).entries) == ["kept"]
