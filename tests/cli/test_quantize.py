"""`mopdctl quantize` from the command line: plans, results, refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, write_tiny_model: Callable[..., Path]) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "plain", hidden_size=64, intermediate_size=128)


def test_a_dry_run_is_one_document_and_writes_nothing(cli: Cli, model: Path, tmp_path: Path) -> None:
    done = cli(
        "quantize",
        model,
        "--format",
        "mxfp4",
        "--tp",
        2,
        "--name",
        "q",
        "--workspace",
        tmp_path / "w",
        "--dry-run",
        "--json",
    )
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["format"] == "mxfp4"
    assert document["quantized"] == {"mxfp4": 14}
    assert document["bytes"] < document["source_bytes"]
    assert "SM100" in done.stderr
    assert not (tmp_path / "w").exists()


def test_a_checkpoint_is_written_and_told_of(cli: Cli, model: Path, tmp_path: Path) -> None:
    done = cli("quantize", model, "--name", "q", "--ignore", "*.1.mlp.*", "--workspace", tmp_path, "--json")
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["quantized"] == {"nvfp4": 11}
    assert document["kept"] == {"Embedding": 1, "ignored by *.1.mlp.*": 3}
    assert 4.5 <= document["size"]["bits_per_quantized_element"] < 4.51
    assert 0.001 < document["errors"]["all"]["relative_mse"] < 0.01
    assert document["checkpoint"] == str(tmp_path / "checkpoints" / "q")
    assert "model.layers.0.mlp.up_proj.weight_packed" in load_file(tmp_path / "checkpoints" / "q" / "model.safetensors")
    again = cli("quantize", model, "--name", "q", "--ignore", "*.1.mlp.*", "--workspace", tmp_path, "--json")
    assert json.loads(again.stdout) == document


def test_options_come_before_the_file_whose_folder_its_paths_start_from(cli: Cli, model: Path, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "model").symlink_to(model)
    config = tmp_path / "here" / "quant.yaml"
    config.write_text("model: ./model\nname: q\nformat: mxfp4\nmethod: max\n", "utf-8")
    done = cli(
        "quantize", "--config", config, "--method", "sweep", "--workspace", tmp_path / "w", "--dry-run", "--json"
    )
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["format"], document["method"]) == ("mxfp4", "sweep")


def test_a_checkpoint_that_is_quantized_moves_or_is_refused(cli: Cli, model: Path, tmp_path: Path) -> None:
    assert cli("quantize", model, "--format", "mxfp4", "--name", "mx", "--workspace", tmp_path).code == 0
    done = cli("quantize", "mx", "--format", "nvfp4", "--name", "nv", "--workspace", tmp_path, "--json")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["move"]["exact_weights"] == 14
    done = cli("quantize", "nv", "--format", "mxfp4", "--name", "back", "--workspace", tmp_path)
    assert done.code == 2
    assert "is quantized already" in done.stderr


def test_the_report_compares_with_the_source_and_goes_into_a_file(cli: Cli, model: Path, tmp_path: Path) -> None:
    (tmp_path / "held_out.txt").write_text("1 plus 2 is 3, and 4 plus 5 is 9. " * 8, "utf-8")
    options = ["--compare", tmp_path / "held_out.txt", "--md", tmp_path / "report.md", "--workspace", tmp_path]
    done = cli("quantize", model, "--name", "q", *options)
    assert done.code == 0, done.stderr
    assert "relative MSE" in done.stdout
    assert "perplexity" in (tmp_path / "report.md").read_text("utf-8")
    assert (tmp_path / "runs" / "q" / "report.json").exists()


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("content", "said"), [(None, "neither a file nor a rollout store"), ("# words", ":1: not JSON"), ("{}", ":1: ")]
)
def test_what_cannot_be_compared_on_is_refused_before_anything_is_written(
    cli: Cli, model: Path, tmp_path: Path, content: str | None, said: str, dry: tuple[str, ...]
) -> None:
    if content is not None:
        (tmp_path / "rows.jsonl").write_text(content, "utf-8")
    options = ["--compare", tmp_path / "rows.jsonl", "--name", "q", "--workspace", tmp_path / "w", *dry]
    done = cli("quantize", model, *options)
    assert done.code == 2
    assert said in done.stderr
    assert not (tmp_path / "w").exists()


def test_a_budget_of_bits_is_kept(cli: Cli, model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "1 plus 2 is 3."}\n{"text": "4 plus 5 is 9."}\n', "utf-8")
    options = [
        "--calibration",
        tmp_path / "rows.jsonl",
        "--bits",
        6.0,
        "--name",
        "q",
        "--workspace",
        tmp_path,
        "--json",
    ]
    done = cli("quantize", model, *options)
    assert done.code == 0, done.stderr
    size = json.loads(done.stdout)["size"]
    assert size["bits_per_quantized_element"] <= 6.01
    told = json.loads((tmp_path / "checkpoints" / "q" / "mopdctl_quantization.json").read_text("utf-8"))
    assert len({module["precision"] for module in told["modules"].values()}) > 1 or told["kept"]
    assert told["precision"]["decided"]["bits"] == 6.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "q", "--ignore", "*.mixer.*"], "pattern '*.mixer.*': matches no module; nearest: "),
        (["--name", "q", "--method", "gptq"], "method `gptq` needs `calibration`"),
        (["--name", "q", "--layout", "modelopt", "--format", "mxfp4"], "no engine loads MXFP4 in the modelopt layout"),
        (["--name", "q", "--tp", 3], "cannot be divided among 3 ranks"),
        (["--name", "q", "--recipe", "gone"], "recipe 'gone': neither a file nor one that ships"),
        (["--name", "../q"], "name '../q'"),
        ([], "key 'name' is missing"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["real", "dry"])
def test_refusals_are_one_line(
    arguments: list[Any], message: str, dry: list[str], cli: Cli, model: Path, tmp_path: Path
) -> None:
    done = cli("quantize", model, *arguments, *dry, "--workspace", tmp_path)
    assert done.code == 2
    assert message in done.stderr
    assert len([line for line in done.stderr.split("\n") if line.startswith("error: ")]) == 1
    assert done.stdout == ""
    assert not (tmp_path / "checkpoints").exists()
