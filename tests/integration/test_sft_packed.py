"""`mopdctl sft` on a generated data set: stages, packing, mixtures and resume, from configuration to checkpoint."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from mopdctl.config.sft import SftConfig
from mopdctl.errors import InputError
from mopdctl.files import write_json, write_jsonl
from mopdctl.runs import Workspace, read_card, read_metrics
from mopdctl.train.sft import plan_sft, run_sft
from mopdctl.train.state import saved_steps

Document = dict[str, Any]
FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])
MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("reasoning_content", pa.string()),
        ("tool_calls", pa.list_(pa.struct([("id", pa.string()), ("type", pa.string()), ("function", FUNCTION)]))),
        ("tool_call_id", pa.string()),
        ("name", pa.string()),
    ]
)
SCHEMA = pa.schema([("messages", pa.list_(MESSAGE)), ("tools", pa.string())])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """`chat.jsonl`, and a data set `generated` of two Parquet shards in a workspace. Runs use other workspaces."""
    from mopdctl.world.data import generate, sft_row

    folder = tmp_path_factory.mktemp("sft")
    rows = {
        d: [sft_row(e, str(n)) for n, e in enumerate(islice(generate(d, "train", seed=1), 20))]
        for d in ("tools", "arithmetic")
    }
    write_jsonl(folder / "chat.jsonl", rows["arithmetic"])
    stored = []
    for row in rows["tools"]:
        messages = json.loads(json.dumps(row["messages"]))
        for call in (c for m in messages for c in m.get("tool_calls") or ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        stored.append({"messages": messages, "tools": json.dumps(row["tools"])})
    for shard in range(2):
        path = folder / "data" / f"train-{shard:05d}-of-00002.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(
            pa.Table.from_pylist(stored[shard * 10 : shard * 10 + 10], schema=SCHEMA), path, row_group_size=4
        )
    write_jsonl(folder / "tools.jsonl", rows["tools"])
    return folder


@pytest.fixture
def document(tiny: Path) -> Document:
    """Two stages: three unpacked steps on a mixture, then three packed steps on all of one data set."""
    mixture = [{"path": "chat.jsonl", "weight": 2}, {"path": "."}]
    return {
        "name": "tuned",
        "model": str(tiny / "models" / "student"),
        "stages": [
            {"name": "mixed", "steps": 3, "data": mixture, "batch_size": 6, "schedule": "cosine", "warmup_steps": 1},
            {"name": "packed", "steps": 3, "data": [{"path": "."}], "packing": "best_fit", "max_length": 200},
        ],
        "train": {"batch_size": 2, "learning_rate": 1e-2, "checkpoint_every": 1, "optimizer": "muon"},
    }


def train(document: Document, root: Path, workspace: Path, **options: Any) -> SimpleNamespace:
    place = Workspace(workspace)
    config = SftConfig.model_validate(document)
    target = run_sft(config, place, base=root, **options)
    metrics = [
        {k: v for k, v in row.items() if not k.startswith("perf/")} for row in read_metrics(place.run(config.name))
    ]
    return SimpleNamespace(weights=load_file(target / "model.safetensors"), metrics=metrics, card=read_card(target))


def assert_same(one: SimpleNamespace, other: SimpleNamespace) -> None:
    assert one.metrics == other.metrics
    assert one.weights.keys() == other.weights.keys()
    assert [name for name, w in one.weights.items() if not torch.equal(w, other.weights[name])] == []


class Stopped(Exception):
    """What a run is interrupted with."""


def stop_after(step: int) -> Callable[[int, Any], None]:
    """Ends a run after step number `step` (from 1) and before its state is saved."""

    def on_step(done: int, metrics: Any) -> None:
        if done == step:
            raise Stopped

    return on_step


# ------------------------------------------------------------------------------------------------------- stages, resume


def test_a_run_resumed_in_any_stage_and_at_the_border_ends_in_the_same_bits(
    tmp_path: Path, root: Path, document: Document
) -> None:
    straight = train(document, root, tmp_path / "straight")
    assert [row["train/stage"] for row in straight.metrics] == ["mixed"] * 3 + ["packed"] * 3
    assert [row["step"] for row in straight.metrics] == list(range(6))
    # killed after 2 of 6 steps, where one stage ends and the other begins, and within the second
    for killed, left in ((3, 2), (4, 3), (6, 5)):
        workspace = tmp_path / str(killed)
        with pytest.raises(Stopped):
            train(document, root, workspace, on_step=stop_after(killed))
        assert saved_steps(Workspace(workspace).run("tuned") / "state") == [left]
        assert_same(train(document, root, workspace), straight)


def test_moments_carry_over_from_stage_to_stage(tmp_path: Path, root: Path, document: Document) -> None:
    """Two stages alike but for their names are one run of one stage, if they see the same rows."""
    one_row = [json.loads(line) for line in (root / "chat.jsonl").read_text("utf-8").splitlines()][:1]
    write_jsonl(tmp_path / "one.jsonl", one_row)
    base = {**document, "stages": [], "data": ["one.jsonl"]}
    whole = train(base | {"train": document["train"] | {"steps": 4}}, tmp_path, tmp_path / "whole")
    stages = [{"name": "one", "steps": 2}, {"name": "two", "steps": 2}]
    parts = train(base | {"stages": stages}, tmp_path, tmp_path / "parts")
    for name, weight in whole.weights.items():
        assert torch.equal(weight, parts.weights[name]), name


# ------------------------------------------------------------------------------------------------------------- packing


def test_packing_changes_neither_loss_nor_weights_beyond_rounding(
    tmp_path: Path, root: Path, document: Document
) -> None:
    # one pack a step holds every row once, as does the unpacked batch of all of them
    data = {"stages": [], "data": ["tools.jsonl"]}
    adamw = document["train"] | {"optimizer": "adamw", "learning_rate": 1e-3, "steps": 2}
    plain = train(document | data | {"train": adamw | {"batch_size": 20}}, root, tmp_path / "plain")
    packed = document | data | {"packing": "best_fit", "max_length": 4096, "train": adamw | {"batch_size": 1}}
    found = train(packed, root, tmp_path / "packed")
    assert found.card["stages"]["sft"]["samples"] == plain.card["stages"]["sft"]["samples"] == 40
    for one, other in zip(plain.metrics, found.metrics, strict=True):
        assert other["train/loss"] == pytest.approx(one["train/loss"], rel=1e-5)
        assert other["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-4)
        assert other["train/loss_tokens"] == one["train/loss_tokens"]


def test_a_stored_data_set_trains_like_the_rows_that_it_was_made_from(
    tmp_path: Path, root: Path, document: Document
) -> None:
    steps = {"stages": [], "train": document["train"] | {"steps": 2, "batch_size": 8}}
    plain = train(document | steps | {"data": ["tools.jsonl"]}, root, tmp_path / "plain")
    assert_same(train(document | steps | {"data": ["."]}, root, tmp_path / "folder"), plain)
    # by its name in the workspace
    sets = tmp_path / "named" / "datasets"
    sets.mkdir(parents=True)
    (sets / "generated").symlink_to(root)
    assert_same(train(document | steps | {"data": ["generated"]}, root, tmp_path / "named"), plain)


def test_a_model_that_mixes_packed_sequences_is_refused_before_the_first_step(
    tmp_path: Path, root: Path, document: Document, tiny_tokenizer: Any
) -> None:
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=tiny_tokenizer.eos_token_id,
    )
    FalconForCausalLM(config).save_pretrained(tmp_path / "falcon")
    tiny_tokenizer.save_pretrained(tmp_path / "falcon")
    with pytest.raises(InputError, match=r"falcon: FalconForCausalLM mixes sequences of one row"):
        train(document | {"model": str(tmp_path / "falcon")}, root, tmp_path / "w")
    assert not (tmp_path / "w" / "runs" / "tuned" / "metrics.jsonl").exists()


# allenai/open-instruct #1497
def test_a_run_does_not_go_on_after_one_character_of_the_template_changed(
    tmp_path: Path, root: Path, document: Document, write_tiny_model: Callable[..., Path]
) -> None:
    model = write_tiny_model(tmp_path / "model")
    changed = document | {"model": str(model)}
    with pytest.raises(Stopped):
        train(changed, root, tmp_path / "w", on_step=stop_after(2))
    template = model / "chat_template.jinja"
    template.write_text(template.read_text("utf-8") + " ", "utf-8")
    with pytest.raises(InputError, match=r"begun with another configuration \(model was .*, now .*\)"):
        train(changed, root, tmp_path / "w")


# ----------------------------------------------------------------------------------------------------------------- cli


def test_the_result_says_what_each_stage_trained_on(
    tmp_path: Path, root: Path, document: Document, cli: Callable[..., SimpleNamespace]
) -> None:
    write_json(root / "sft.yaml", document)
    command = ("sft", "--config", root / "sft.yaml", "--workspace", tmp_path / "w", "--json")
    planned = cli(*command, "--dry-run")
    assert planned.code == 0, planned.stderr
    assert not (tmp_path / "w").exists()
    ended = cli(*command)
    assert ended.code == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert json.loads(planned.stdout)["stages"] == found["stages"]
    mixed, packed = found["stages"]["mixed"], found["stages"]["packed"]
    assert (mixed["rows"], mixed["samples"], mixed["packs"], mixed["fill"]) == (40, 18, None, None)
    assert (packed["rows"], packed["packs"], packed["dropped"]) == (20, 6, {"overlong": 0})
    assert 0.5 < packed["fill"] <= 1
    assert 0 < packed["trainable_share"] < 1
    assert "packed  loss" in ended.stderr
    assert "tokens/s" in ended.stderr
    assert "% with loss" in ended.stderr
    assert cli(*command).stdout == ended.stdout  # a finished run is left alone and says the same


def test_too_long_rows_are_counted_for_a_dry_run_too(root: Path, tmp_path: Path, document: Document) -> None:
    short = document | {"stages": [], "data": ["chat.jsonl", "tools.jsonl"], "max_length": 64, "overlong": "drop"}
    config = SftConfig.model_validate(short | {"train": document["train"] | {"steps": 1}})
    found = plan_sft(config, Workspace(tmp_path / "w"), base=root, dry_run=True)["stages"]["sft"]
    assert (found["rows"], found["dropped"]) == (40, {"overlong": 20})  # all that hold tools
