"""One command makes a data set out of two small models in this process, and every reader and trainer takes it."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mopdctl.files import write_text


def write_yaml(path: Path, document: dict[str, Any]) -> Path:
    write_text(path, json.dumps(document, indent=1))  # JSON is YAML
    return path


@pytest.fixture(scope="module")
def made(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A data set `local` of two members, two samples a seed."""
    from mopdctl.config.base import load_config
    from mopdctl.config.gensft import GenConfig
    from mopdctl.gensft.run import run
    from mopdctl.gensft.spec import prepare
    from mopdctl.runs import Workspace

    root = tmp_path_factory.mktemp("gensft")
    member = {"engine": "hf", "license": "apache-2.0", "sampling": {"max_tokens": 48}, "max_concurrency": 8}
    write_yaml(
        root / "committee.yaml",
        {
            "members": {
                "one": member | {"model": str(tiny / "models" / "arithmetic")},
                "two": member | {"model": str(tiny / "models" / "tools")},
            },
            "routes": {"default": {"members": {"one": 1, "two": 1}}},
        },
    )
    write_yaml(
        root / "gen.yaml",
        {
            "name": "local",
            "committee": "committee.yaml",
            "samples": 2,
            "seeds": [{"path": str(tiny / "prompts.jsonl"), "source": "tiny", "license": "cc0-1.0"}],
            "filter": {"off": ["repetition", "control_tokens", "tool_pairing"], "min_words": 0},
            "write": {"validation_share": 0.5},
        },
    )

    def again(workspace: Path = root / "workspace") -> dict[str, Any]:
        spec = prepare(load_config(GenConfig, root / "gen.yaml"), Workspace(workspace), base=root)
        return run(spec)

    first = again()
    return SimpleNamespace(root=root, first=first, again=again, folder=root / "workspace" / "datasets" / "local")


def test_one_command_gives_a_data_set_and_a_second_run_asks_nothing(made: SimpleNamespace) -> None:
    assert made.first["requests"] == 48
    assert made.first["complete"]
    stages = {stage["stage"]: stage for stage in made.first["stages"]}
    assert (stages["generate"]["in"], stages["generate"]["out"]) == (48, 48)
    assert sum(made.first["rows"].values()) == stages["decontaminate"]["out"]
    assert made.first["rows"]["validation"] > 0
    before = (made.folder / "manifest.json").read_bytes()
    assert made.again()["requests"] == 0
    assert (made.folder / "manifest.json").read_bytes() == before


def test_counts_go_through_all_stages(made: SimpleNamespace) -> None:
    stages = made.first["stages"]
    for stage in stages:
        assert stage["in"] - sum(stage["dropped"].values()) == stage["out"]
    for one, other in pairwise(stages[1:]):
        assert one["out"] == other["in"]
    for stage in stages[2:]:
        for reason, count in stage["dropped"].items():
            kind = {"exact": "duplicate", "near": "duplicate", "against": "duplicate"}.get(reason, reason)
            held = (made.folder / "quarantine" / f"{kind}.jsonl").read_bytes().count(b"\n")
            assert held >= count


def test_datasets_polars_and_duckdb_read_the_same_rows(made: SimpleNamespace) -> None:
    import datasets
    import duckdb
    import polars as pl

    loaded = datasets.load_dataset(str(made.folder))
    assert {split: len(rows) for split, rows in loaded.items()} == made.first["rows"]
    train = loaded["train"]
    pattern = str(made.folder / "data" / "train-*.parquet")
    assert pl.read_parquet(pattern)["id"].to_list() == train["id"]
    query = f"select id, messages[-1].content, generator from '{pattern}'"
    rows = duckdb.sql(query).fetchall()
    assert [(row["id"], row["messages"][-1]["content"], row["generator"]) for row in train] == rows
    assert {row["generator"] for row in train} == {"one", "two"}
    with_tools = [row for row in train if row["tools"]]
    assert with_tools
    assert with_tools[0]["tools"][0]["function"]["name"]
    assert {row["source"] for row in train} == {"tiny"}
    assert {row["generator_license"] for row in train} == {"apache-2.0"}
    assert all(row["sampling"] == {"max_tokens": 48} for row in train)


def test_answers_to_one_prompt_are_never_in_both_splits(made: SimpleNamespace) -> None:
    import polars as pl

    seeds = {s: set(pl.read_parquet(made.folder / "data" / f"{s}-*.parquet")["seed_id"]) for s in made.first["rows"]}
    assert not seeds["train"] & seeds["validation"]


class Dead(Exception):
    """The process is gone."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_deaths_inside_the_journal_change_no_byte_of_the_data_set(
    made: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import os
    import random
    import shutil

    from mopdctl.gensft.journal import Journal

    rng = random.Random(0)
    left = 0  # bytes until death; None lives on
    whole = Journal._append

    def append(self: Journal, line: bytes) -> None:
        nonlocal left
        if left < len(line):
            if left > 0:
                os.write(self._file, line[:left])
            left = -1
            raise Dead
        left -= len(line)
        whole(self, line)

    expected = {p.relative_to(made.folder): p.read_bytes() for p in made.folder.rglob("*") if p.is_file()}
    size = (made.root / "workspace" / "runs" / "local.gen-sft" / "journal.jsonl").stat().st_size
    deaths = 0
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "_append", append)
        while deaths < 50:
            shutil.rmtree(tmp_path / "w", ignore_errors=True)
            while True:
                left = rng.randrange(1, size // 4)
                try:
                    document = made.again(tmp_path / "w")
                    break
                except Dead:
                    deaths += 1
            folder = tmp_path / "w" / "datasets" / "local"
            assert {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()} == expected
            assert document["complete"]
    assert made.again(tmp_path / "w")["requests"] == 0


def test_sft_lowers_the_loss_on_it_and_resumes_exactly(
    made: SimpleNamespace, tiny: Path, finished: Callable[..., SimpleNamespace]
) -> None:
    from mopdctl.config.sft import SftConfig
    from mopdctl.runs import Workspace
    from mopdctl.train.sft import run_sft

    class Killed(Exception):
        pass

    def sft(workspace: str, *, die_at: int = 0) -> Any:
        config = SftConfig.model_validate(
            {
                "model": str(tiny / "models" / "student"),
                "data": ["local"],
                "name": "tuned",
                "max_length": 128,
                "train": {"steps": 12, "batch_size": 8, "learning_rate": 3e-3, "checkpoint_every": 2},
            }
        )
        root = made.root / workspace
        if not (root / "datasets").exists():
            root.mkdir(exist_ok=True)
            (root / "datasets").symlink_to(made.root / "workspace" / "datasets")

        def on_step(step: int, metrics: dict[str, Any]) -> None:
            if step == die_at:
                raise Killed

        run_sft(config, Workspace(root), base=root, on_step=on_step)
        return finished_sft(root)

    def finished_sft(root: Path) -> Any:
        from safetensors.torch import load_file

        from mopdctl.runs import Workspace, read_metrics

        folder = Workspace(root)
        losses = [row["train/loss"] for row in read_metrics(folder.run("tuned"))]
        return losses, load_file(folder.checkpoint("tuned") / "model.safetensors")

    losses, weights = sft("straight")
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    with pytest.raises(Killed):
        sft("killed", die_at=7)
    resumed, again = sft("killed")
    assert resumed == losses
    assert all((weights[name] == again[name]).all() for name in weights)


@pytest.mark.slow
def test_trl_takes_two_training_steps_on_it_unchanged(made: SimpleNamespace, tiny: Path, tmp_path: Path) -> None:
    import datasets
    from trl import SFTConfig, SFTTrainer

    train = datasets.load_dataset(str(made.folder), split="train")
    assert any(train["tools"])
    trainer = SFTTrainer(
        model=str(tiny / "models" / "student"),
        args=SFTConfig(
            output_dir=str(tmp_path / "trl"),
            max_steps=2,
            per_device_train_batch_size=4,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            bf16=False,
        ),
        train_dataset=train,
    )
    result = trainer.train()
    assert result.global_step == 2
    assert 0 < result.training_loss < 100
