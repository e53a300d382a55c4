import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mopdctl.config.quant import PrecisionRule, QuantConfig
from mopdctl.engines.fp4 import dequantized, stored_modules
from mopdctl.engines.weights import open_tensors
from mopdctl.errors import InputError
from mopdctl.files import read_json
from mopdctl.fp4 import e2m1
from mopdctl.quant.compare import Comparing
from mopdctl.quant.moves import move_checkpoint
from mopdctl.quant.report import build_report, kernels, kind_of, layer_of, report_on
from mopdctl.quant.report_md import to_markdown, to_text
from mopdctl.quant.run import quantize_model
from mopdctl.runs import Workspace


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory, write_tiny_model: Callable[..., Path]) -> Workspace:
    """A model of two layers in NVFP4, and in NVFP4 with FP8 attention; MXFP4, and that moved to NVFP4."""
    root = tmp_path_factory.mktemp("report")
    write_tiny_model(root / "model")
    space = Workspace(root / "workspace")
    rules = [PrecisionRule(match="*self_attn*", precision="fp8")]
    for name, settings in {
        "nvfp4": {"format": "nvfp4", "method": "46"},
        "mixed": {"format": "nvfp4", "method": "max", "rules": rules},
        "mxfp4": {"format": "mxfp4", "method": "max"},
    }.items():
        quantize_model(QuantConfig(model=str(root / "model"), name=name, **settings), space, base=root)  # type: ignore[arg-type]
    move_checkpoint(QuantConfig(model="mxfp4", name="moved", format="nvfp4"), space, base=root)
    return space


def report(space: Workspace, name: str, **given: Any) -> dict[str, Any]:
    return build_report(space.checkpoint(name), space.root.parent / "model", **given)


COMPARISON: dict[str, Any] = {
    "sources": ["rows.jsonl"],
    "settings": {"rows": 64, "max_length": 1024, "max_new_tokens": 256, "dtype": "float32"},
    "dropped_rows": 2,
    "answers": {
        "rows": 10,
        "tokens": 1234,
        "kl_nats": {"mean": 0.01234567, "stderr": 0.001},
        "top1_agreement": {"mean": 0.95, "stderr": 0.01},
        "given": 7,
        "own": 3,
    },
    "text": None,
    "greedy": {
        "prompts": 10,
        "tokens_full": 100.0,
        "tokens_quantized": 106.0,
        "ratio": 1.06,
        "truncated_share_full": 0.0,
        "truncated_share_quantized": 0.1,
        "same_answer_share": 0.4,
    },
    "not_measured": {"text": "no source holds held-out text (rows of `text`, or a .txt file)"},
}


def test_bits_and_bytes_are_those_of_the_exported_tensors(space: Workspace) -> None:
    size = report(space, "nvfp4")["size"]
    tensors = load_file(space.checkpoint("nvfp4") / "model.safetensors")
    # q, k, v, o: 32 x 32; gate, up: 64 x 32; down: 32 x 64; two layers.
    elements = 2 * (4 * 32 * 32 + 3 * 64 * 32)
    assert (size["quantized_elements"], size["quantized_weights"]) == (elements, 14)
    # Four bits, eight for each 16 values, and 32 for each matrix.
    assert size["bits_per_quantized_element"] == 4.5 + 14 * 32 / elements
    assert size["bytes"] == sum(t.numel() * t.element_size() for t in tensors.values())
    others = sum(t.numel() for name, t in tensors.items() if "_proj" not in name)
    assert size["elements"] == elements + others
    assert size["bits_per_element"] == 8 * size["bytes"] / size["elements"]
    source = load_file(space.root.parent / "model" / "model.safetensors")
    assert size["source_bytes"] == sum(t.numel() * t.element_size() for t in source.values())


def test_what_is_quantized_and_what_stays_is_counted(space: Workspace) -> None:
    found = report(space, "mixed")
    assert found["quantized"] == {"fp8": 8, "nvfp4": 6}
    assert sum(found["kept"].values()) == 1  # the embeddings, which are the head as well
    assert "weights: 8 fp8, 6 nvfp4" in to_text(found).split("\n")
    found["warnings"] = ["a kernel\x1b is missing"]
    assert "- warning: a kernel? is missing" in to_markdown(found).split("\n")


def test_errors_are_those_of_the_exported_bytes_in_float64(space: Workspace) -> None:
    found = report(space, "mixed")["errors"]
    source = load_file(space.root.parent / "model" / "model.safetensors")
    tensors = open_tensors(str(space.checkpoint("mixed")))
    modules = stored_modules(tensors)
    pairs = {
        name: (source[f"{name}.weight"].double(), dequantized(tensors, module, torch.float64))
        for name, module in modules.items()
    }

    def expected(names: list[str]) -> tuple[float, float]:
        weight = torch.cat([pairs[name][0].flatten() for name in names])
        quantized = torch.cat([pairs[name][1].flatten() for name in names])
        error = (quantized - weight).square().sum() / weight.square().sum()
        return float(error), float(torch.cosine_similarity(weight, quantized, 0))

    groups = {"all": list(pairs)} | {name: [name] for name in pairs}
    groups |= {f"model.layers.{i}": [n for n in pairs if f".{i}." in n] for i in (0, 1)}
    groups |= {p: [n for n, m in modules.items() if m.precision == p] for p in ("fp8", "nvfp4")}
    shown = {"all": found["all"], **found["weights"], **found["by_layer"], **found["by_precision"]}
    assert shown.keys() == groups.keys()
    for name, names in groups.items():
        error, cosine = expected(names)
        assert shown[name]["relative_mse"] == pytest.approx(error, rel=1e-5), name
        assert shown[name]["cosine"] == pytest.approx(cosine, rel=1e-7), name
        assert shown[name]["weights"] == len(names)
    assert found["by_kind"]["model.layers.*.mlp.up_proj"]["weights"] == 2
    assert found["by_precision"]["fp8"]["blocks"] is None
    assert found["by_precision"]["fp8"]["four_share"] is None


def test_the_share_of_blocks_at_four_is_counted_in_the_codes(space: Workspace) -> None:
    found = report(space, "nvfp4")["errors"]["all"]
    tensors = load_file(space.checkpoint("nvfp4") / "model.safetensors")
    packed = [t for name, t in tensors.items() if name.endswith("weight_packed")]
    largest = torch.cat([(e2m1.unpack(p) & 7).unflatten(-1, (-1, 16)).amax(-1).flatten() for p in packed])
    assert found["blocks"] == len(largest)
    assert found["four_share"] == float((largest == 6).double().mean())  # code 6 stands for 4
    assert 0.2 < found["four_share"] < 0.7
    assert (found["clipped_blocks"], found["underflowed_blocks"]) == (0, 0)


def test_a_moved_checkpoint_tells_what_was_kept_instead_of_errors(space: Workspace) -> None:
    found = build_report(space.checkpoint("moved"), space.checkpoint("mxfp4"))
    assert found["errors"] is None
    assert found["not_measured"]["errors"].startswith("the checkpoint was moved")
    assert (found["move"]["exact_weights"], found["move"]["changed_elements"]) == (14, 0)
    assert "moved exactly: 14 of 14 weights; rounded blocks: 0 of" in to_text(found)


@pytest.mark.parametrize(
    ("precisions", "quantized_inputs", "said"),
    [
        (["nvfp4"], False, ["NVFP4: runs as W4A16 on every GPU, SM90"]),
        (["nvfp4"], True, ["on SM90 (H100, H200) and older vLLM runs it as W4A16", "Scores taken on SM90 say nothing"]),
        (["mxfp4"], False, ["W4A16 on SM90", "may run it as W4A4 on SM100", "though the checkpoint asks for W4A16"]),
        (["mxfp4"], True, ["may run it as W4A4 on SM100"]),
        (["fp8"], False, ["FP8: runs as W8A16"]),
        (["fp8"], True, ["FP8: runs as W8A8"]),
        (["mxfp4", "nvfp4", "fp8"], False, ["NVFP4", "MXFP4", "FP8"]),
    ],
)
def test_the_kernel_that_will_run_is_named(precisions: list[str], quantized_inputs: bool, said: list[str]) -> None:
    # vllm #56770: MXFP4A16 runs as W4A4 on SM100
    lines = list(kernels(precisions, quantized_inputs=quantized_inputs))
    assert len(lines) == len(precisions)
    assert all(words in " ".join(lines) for words in said)
    assert ("asks for W4A16" in " ".join(lines)) == ("mxfp4" in precisions and not quantized_inputs)


def test_what_was_not_measured_is_null_with_a_reason(space: Workspace) -> None:
    found = build_report(space.checkpoint("nvfp4"), None)
    assert (found["size"]["source_bytes"], found["comparison"]) == (None, None)
    assert found["not_measured"] == {
        "source_bytes": "the source is not there",
        "comparison": "no rows to compare on were given",
    }
    assert report(space, "nvfp4", reason="its head is a Conv1d")["not_measured"] == {
        "comparison": "its head is a Conv1d"
    }
    for shown in (to_text(found), to_markdown(found)):
        assert "not measured: comparison, because no rows to compare on were given" in shown
    json.dumps(found, allow_nan=False)


def test_a_comparison_that_fails_leaves_the_rest_of_the_report(
    space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any, **options: Any) -> dict[str, Any]:
        raise InputError("model x: its head is a Conv1d")

    checkpoint, source = space.checkpoint("nvfp4"), str(space.root.parent / "model")
    monkeypatch.setattr("mopdctl.quant.report.compare", fails)
    found = report_on(checkpoint, source, Comparing(("rows.jsonl",)), space, base=space.root)
    assert found["not_measured"] == {"comparison": "model x: its head is a Conv1d"}
    monkeypatch.setattr("mopdctl.quant.report.compare", lambda *arguments, **options: COMPARISON)
    found = report_on(checkpoint, source, Comparing(("rows.jsonl",)), space, base=space.root)
    assert found["comparison"] == COMPARISON
    assert found["not_measured"] == {}
    assert read_json(space.run("nvfp4") / "report.json") == found
    assert report_on(checkpoint, source, None, space, base=space.root)["comparison"] is None


def test_only_what_quantize_wrote_has_a_report(space: Workspace) -> None:
    with pytest.raises(InputError, match=r"holds no mopdctl_quantization\.json"):
        build_report(space.root.parent / "model", None)


@pytest.mark.parametrize(
    ("name", "layer", "kind"),
    [
        ("model.layers.12.self_attn.q_proj", "model.layers.12", "model.layers.*.self_attn.q_proj"),
        ("model.layers.3.mlp.experts.17.up_proj", "model.layers.3", "model.layers.*.mlp.experts.*.up_proj"),
        ("lm_head", "lm_head", "lm_head"),
    ],
)
def test_weights_are_summed_by_layer_and_by_kind(name: str, layer: str, kind: str) -> None:
    assert (layer_of(name), kind_of(name)) == (layer, kind)


def test_the_text_has_every_figure(space: Workspace) -> None:
    text = to_text(report(space, "nvfp4", comparison=COMPARISON))
    lines = [" ".join(line.split()) for line in text.split("\n")]
    for line in (
        "format nvfp4, method 46, act none, layout compressed-tensors",
        "KL(source || quantized) on answers, nats per token 0.01235 +- 0.00100",
        "same likeliest token on answers, % 95.00 +- 1.00",
        "tokens of a greedy answer 100.0 106.0 1.060x",
        "answers cut off, % 0.0 10.0 +10.0",
        "answers: 1,234 tokens of 7 given answers and 3 greedy ones of the source",
        "dropped: 2 rows with nothing left in 1024 tokens",
        "not measured: text, because no source holds held-out text (rows of `text`, or a .txt file)",
    ):
        assert line in lines
    worst = max(report(space, "nvfp4")["errors"]["weights"].values(), key=lambda one: one["relative_mse"])
    first = next(line for line in text.split("\n") if line.startswith("worst: "))
    assert f"{worst['relative_mse']:.3e}" in first


def test_markdown_keeps_its_columns_whatever_the_names_hold(space: Workspace) -> None:
    found = report(space, "nvfp4", comparison=COMPARISON)
    found["errors"]["by_kind"]["a|b\x1b[2J*"] = found["errors"]["all"]
    text = to_markdown(found)
    rows = [line for line in text.split("\n") if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {8, 5}
    assert "| a\\|b?[2J\\* |" in text
    assert "## nvfp4: " in text
    assert "| model.layers.1 | 7 |" in text
    assert "model.layers.1 " not in to_text(found)  # of which a large model has a hundred
    assert "\x1b" not in text
