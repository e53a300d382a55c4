"""A checkpoint that is damaged in any of the ways that engines stumble over does not pass."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mopdctl.engines.weights import open_tensors
from mopdctl.errors import CheckFailedError
from mopdctl.quant.check import check_checkpoint

Make = Callable[..., Path]
Tensors = dict[str, Any]

ATTENTION = "model.layers.0.self_attn"
UP = "model.layers.0.mlp.up_proj"
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def sources(checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sound checkpoints to damage: one of each kind of precision, and their source."""
    from mopdctl.config.quant import QuantConfig
    from mopdctl.quant.run import quantize_model
    from mopdctl.runs import Workspace

    root, model = tmp_path_factory.mktemp("sound"), checkpoint("llama")
    settings: dict[str, dict[str, Any]] = {
        "nvfp4": {},
        "mxfp4": {"format": "mxfp4"},
        "modelopt": {"layout": "modelopt"},
        "mixed": {"rules": [{"match": "*.self_attn.*", "precision": "fp8"}]},
        "cache": {"kv_cache": "fp8"},
    }
    for name, one in settings.items():
        config = QuantConfig.model_validate({"model": str(model), "name": name, "method": "max"} | one)
        quantize_model(config, Workspace(root), base=root)
    return {name: root / "checkpoints" / name for name in settings} | {"source": model}


@pytest.fixture
def problem(sources: dict[str, Path], tmp_path: Path) -> Callable[..., str]:
    """What the check says of a checkpoint after `change` of its tensors and its quantization configuration."""

    def find(kind: str, change: Callable[[Tensors, Any], object] = lambda tensors, block: None, **check: Any) -> str:
        folder = Path(shutil.copytree(sources[kind], tmp_path / kind))
        tensors, config = (
            load_file(folder / "model.safetensors"),
            json.loads((folder / "config.json").read_text("utf-8")),
        )
        change(tensors, config["quantization_config"])
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        with pytest.raises(CheckFailedError) as caught:
            check_checkpoint(folder, **check)
        return str(caught.value).removeprefix(f"{folder}: ")

    return find


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "modelopt", "mixed"])
def test_what_was_written_passes(kind: str, sources: dict[str, Path]) -> None:
    check_checkpoint(sources[kind], source=open_tensors(str(sources["source"])))
    check_checkpoint(sources[kind])


def put(name: str, place: int, byte: int) -> Callable[[Tensors, Any], object]:
    return lambda tensors, block: tensors[name].view(torch.uint8).view(-1).__setitem__(place, byte)


@pytest.mark.parametrize(
    ("kind", "name", "byte"),
    [
        ("nvfp4", f"{UP}.weight_scale", 0x7F),
        ("nvfp4", f"{UP}.weight_scale", 0xFF),
        ("nvfp4", f"{UP}.weight_scale", 0x80 | 0x38),
        ("mxfp4", f"{UP}.weight_scale", 0xFF),
        ("mixed", f"{ATTENTION}.q_proj.weight", 0x7F),
        ("modelopt", f"{UP}.weight_scale", 0x7F),
    ],
)
def test_one_byte_of_nan_is_found(kind: str, name: str, byte: int, problem: Any) -> None:
    # vllm-omni #4025: all output was "!"
    assert problem(kind, put(name, -1, byte)) == f"{name}: holds a byte that is NaN or negative"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t, b: t.update({f"{UP}.weight_scale": t[f"{UP}.weight_scale"][:, :2].clone()}),
            r"shape \[96, 2\] where",
        ),
        (lambda t, b: t.update({f"{UP}.weight_scale": t[f"{UP}.weight_scale"][:9].clone()}), r"shape \[9, 4\] where"),
        (lambda t, b: t.update({f"{UP}.weight_global_scale": torch.ones(2)}), r"shape \[2\] where one number"),
        (lambda t, b: t.update({"model.layers.0.mlp.weight_scale": torch.ones(1)}), "belongs to no quantized weight"),
        (lambda t, b: t.update({f"{UP}.input_scale": torch.ones(1)}), "belongs to no quantized weight"),
    ],
)
def test_tensors_of_wrong_shape_and_leaked_ones_are_found(change: Any, message: str, problem: Any) -> None:
    # Model-Optimizer #2038: scales taken from packed codes had half their width; names with `_scale` leaked
    import re

    assert re.search(message, problem("nvfp4", change))


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
def test_a_tensor_scale_that_is_no_scale_is_found(value: float, problem: Any) -> None:
    # compressed-tensors #595, Model-Optimizer #1265
    name = f"{UP}.weight_global_scale"
    assert "which is no scale" in problem("nvfp4", lambda t, b: t[name].fill_(value))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("nvfp4", f"{ATTENTION}.k_proj.weight_global_scale"),
        ("nvfp4", f"{UP}.weight_global_scale"),
        ("modelopt", f"{ATTENTION}.v_proj.weight_scale_2"),
        ("mixed", f"{ATTENTION}.q_proj.weight_scale"),
    ],
)
def test_scales_that_differ_within_a_fused_group_are_found(kind: str, name: str, problem: Any) -> None:
    # llm-compressor #1869: 9600, 12992 and 12160 in q, k and v
    assert "differ, and an engine that fuses these layers keeps one" in problem(kind, lambda t, b: t[name].mul_(1.1))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_scales_of_keys_and_values_that_are_none_are_found(problem: Any, value: float) -> None:
    name = f"{ATTENTION}.k_scale"
    assert problem("cache", lambda tensors, block: tensors[name].fill_(value)).startswith(f"{name}: is ")


def test_more_than_one_scale_of_keys_is_found(problem: Any) -> None:
    name = f"{ATTENTION}.k_scale"
    found = problem("cache", lambda tensors, block: tensors.update({name: torch.ones(7, dtype=torch.bfloat16)}))
    assert found == f"{name}: shape [7] where one number is needed"


def test_block_scales_that_leave_the_top_of_their_range_unused_are_found(problem: Any) -> None:
    # vllm #34577, #37464: Marlin takes for granted that the highest bit of the scales is set
    def halve(tensors: Tensors, block: Any) -> None:
        scale = tensors[f"{DOWN}.weight_scale"]
        tensors[f"{DOWN}.weight_scale"] = (scale.float() / 4).to(torch.float8_e4m3fn)
        tensors[f"{DOWN}.weight_global_scale"] /= 4

    assert "where one in [192, 448] is needed" in problem("nvfp4", halve)


def drop(group: str, key: str, value: Any) -> Callable[[Tensors, Any], object]:
    return lambda tensors, block: block["config_groups"][group]["weights"].__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, b: b["ignore"].append(UP), f"{UP}: is quantized, and config.json ignores it"),
        (lambda t, b: b["ignore"].remove("lm_head"), "lm_head: is not quantized, and config.json does not ignore it"),
        (
            lambda t, b: t.update({"mtp.fc.weight": torch.zeros(4, 4)}),
            "mtp.fc: is not quantized, and config.json does not ignore it",
        ),
        (
            drop("group_0", "method", "sweep"),
            "config.json: group_0.weights: compressed-tensors 0.17 refuses the key 'method'",
        ),
        (drop("group_0", "group_size", 32), "config.json: group_0.weights: group_size is 32, which is not nvfp4"),
        (
            lambda t, b: b["config_groups"]["group_0"].update(note="x"),
            "group_0: compressed-tensors 0.17 refuses the key 'note'",
        ),
        (lambda t, b: b.clear(), "`quant_method` None is not known"),
    ],
)
def test_a_configuration_that_is_refused_or_says_something_else_is_found(
    change: Any, message: str, problem: Any
) -> None:
    # vllm #45102, #44081, #45132: lm_head quantized and excluded; vllm #38832: a layer in neither
    assert message in problem("nvfp4", change)


def test_a_group_of_another_precision_is_found(problem: Any) -> None:
    def swap(tensors: Tensors, block: Any) -> None:
        one, other = (block["config_groups"][group] for group in ("group_0", "group_1"))
        one["targets"], other["targets"] = other["targets"], one["targets"]

    assert "and config.json says" in problem("mixed", swap)


def test_mxfp4_in_the_modelopt_layout_is_found(problem: Any) -> None:
    assert "no engine loads the `quant_algo` 'mxfp4'" in problem("modelopt", lambda t, b: b.update(quant_algo="mxfp4"))


# ------------------------------------------------------------------------------------------------- against the source


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "modelopt", "mixed"])
def test_a_code_that_is_not_that_of_the_weight_is_found(kind: str, problem: Any, sources: dict[str, Path]) -> None:
    # Model-Optimizer #2243: codes were chosen with scales before they were rounded
    name = f"{DOWN}.weight" if kind == "modelopt" else f"{DOWN}.weight_packed"

    def flip(tensors: Tensors, block: Any) -> None:
        tensors[name].view(-1)[-1] ^= 0x10

    source = open_tensors(str(sources["source"]))
    assert problem(kind, flip, source=source).startswith(f"{name}: is not what {DOWN}.weight of the source is")


def test_codes_of_gptq_are_not_those_of_rounding_and_need_not_be(sources: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sources["nvfp4"], tmp_path / "copy"))
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{DOWN}.weight_packed"].view(-1)[-1] ^= 0x10
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    check_checkpoint(folder, source=open_tensors(str(sources["source"])), rounded=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, b: t.pop("model.norm.weight"), "model.norm.weight: is missing"),
        (lambda t, b: t["model.norm.weight"].add_(1), "model.norm.weight: is not as it is in the source"),
        (lambda t, b: t.update({"model.more": torch.zeros(2)}), "model.more: is not in the source"),
        (
            lambda t, b: t.update({"model.norm.weight": t["model.norm.weight"].float()}),
            "model.norm.weight: is not as it is in the source",
        ),
    ],
)
def test_what_is_missing_changed_or_too_much_is_found(
    change: Any, message: str, problem: Any, sources: dict[str, Path]
) -> None:
    assert message in problem("nvfp4", change, source=open_tensors(str(sources["source"])))
