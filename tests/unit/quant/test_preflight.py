"""What is found before anything is written: broken weights, shapes for ranks, room, warnings."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mopdctl.config.quant import QuantConfig
from mopdctl.errors import InputError
from mopdctl.quant.preflight import check_divisible, warnings
from mopdctl.quant.run import plan_quantization
from mopdctl.runs import Workspace

Make = Callable[..., Path]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def dry(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What a dry run says; it may write nothing."""

    def run(model: Path, **settings: Any) -> dict[str, Any]:
        config = QuantConfig.model_validate({"model": str(model), "name": "out"} | settings)
        found = plan_quantization(config, Workspace(tmp_path / "workspace"), base=tmp_path)
        assert not (tmp_path / "workspace").exists()
        return found

    return run


def test_a_dry_run_counts_and_writes_nothing(checkpoint: Make, dry: Any) -> None:
    found = dry(checkpoint("qwen3_moe"), rules=[{"match": "*.self_attn.*", "precision": "fp8"}])
    assert found["quantized"] == {"fp8": 8, "nvfp4": 24}
    assert found["groups"] == 2 + 8  # q/k/v of two layers, gate/up of eight experts
    assert found["kept"] == {"Embedding": 1, "Qwen3MoeTopKRouter": 2, "the output head": 1}
    assert found["zero"] == []
    assert found["bytes"] < found["source_bytes"]
    assert found["memory_bytes"] > 0


@pytest.mark.parametrize("name", [UP, "model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_no_number_is_named(
    name: str, value: float, editable: Make, checkpoint: Make, dry: Any
) -> None:
    # llm-compressor 0.14 writes a NaN scale for such a weight and says nothing
    from safetensors.torch import load_file

    tensor = load_file(checkpoint("llama") / "model.safetensors")[name]
    tensor.view(-1)[-1] = value
    with pytest.raises(InputError, match=f"^{name}: holds NaN or infinity"):
        dry(editable("llama", {name: tensor}))


def test_a_weight_beyond_float32_is_named(editable: Make, dry: Any) -> None:
    with pytest.raises(InputError, match=f"^{UP}: holds NaN or infinity, in float32"):
        dry(editable("llama", {UP: torch.full((96, 64), 1e300, dtype=torch.float64)}))


def test_zero_weights_are_no_error_and_are_told(editable: Make, dry: Any) -> None:
    assert dry(editable("llama", {UP: torch.zeros(96, 64, dtype=torch.bfloat16)}))["zero"] == [
        UP.removesuffix(".weight")
    ]


def test_magnitudes_are_those_of_the_fused_group(checkpoint: Make, planned: Any, tmp_path: Path) -> None:
    # llm-compressor #1869: q, k and v had divisors of their own
    from mopdctl.quant.preflight import preflight

    plan = planned(checkpoint("llama"))
    found = preflight(plan, QuantConfig(model="m", name="out"), {}, tmp_path).amax
    for layer in range(2):
        names = [f"model.layers.{layer}.self_attn.{which}_proj" for which in "qkv"]
        own = [float(plan.tensors.tensor(f"{name}.weight").float().abs().max()) for name in names]
        assert [found[name] for name in names] == [max(own)] * 3
        assert len(set(own)) > 1


@pytest.mark.parametrize(
    ("format", "size", "message"),
    [
        (
            "nvfp4",
            8,
            r"self_attn.k_proj: 32 rows|down_proj: 96 columns cannot be divided among 8 ranks in blocks of 16",
        ),
        ("mxfp4", 2, r"down_proj: 96 columns cannot be divided among 2 ranks in blocks of 32"),
        ("fp8", 5, r"cannot be divided among 5 ranks;"),
    ],
)
def test_shapes_that_ranks_cannot_divide_are_refused(
    format: str, size: int, message: str, checkpoint: Make, planned: Any
) -> None:
    # vllm #48898: garbage with eight ranks, where columns of a rank were no multiple of the block
    with pytest.raises(InputError, match=message):
        check_divisible(planned(checkpoint("llama"), format=format), size)


def test_shapes_that_ranks_can_divide_pass(checkpoint: Make, planned: Any) -> None:
    plan = planned(checkpoint("llama"))
    check_divisible(plan, 2)
    assert list(warnings(plan, QuantConfig(model="m", name="out", tp=[1]))) == []


def test_columns_of_a_rank_that_some_kernels_get_wrong_are_a_warning(checkpoint: Make, planned: Any) -> None:
    # vllm #48898, for NVFP4: 48 columns are three blocks of 16
    config = QuantConfig(model="m", name="out", tp=[2])
    assert any("48 columns, no multiple of 32" in line for line in warnings(planned(checkpoint("llama")), config))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"format": "mxfp4"}, True),
        ({"format": "mxfp4", "act": "dynamic"}, False),
        ({"format": "nvfp4"}, False),
    ],
)
def test_mxfp4_weights_that_run_with_quantized_inputs_are_a_warning(
    settings: dict[str, Any], told: bool, checkpoint: Make, planned: Any
) -> None:
    # vllm #56770: W4A16 in MXFP4 runs as W4A4 on SM100 and later
    config = QuantConfig(model="m", name="out", **settings)
    assert any("SM100" in line for line in warnings(planned(checkpoint("llama"), **settings), config)) == told


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"format": "fp8"}, True),
        ({"rules": [{"match": "*.o_proj", "precision": "fp8"}]}, True),
        ({"format": "fp8", "act": "dynamic"}, False),
        ({}, False),
    ],
)
def test_fp8_beside_inputs_in_16_bits_is_a_warning(
    settings: dict[str, Any], told: bool, checkpoint: Make, planned: Any
) -> None:
    # vllm #52182: before it "Failed to find a kernel that can implement the ScaledMM linear layer" on an H200
    config = QuantConfig.model_validate({"model": "m", "name": "out"} | settings)
    assert any("W8A8" in line for line in warnings(planned(checkpoint("llama"), **settings), config)) == told


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_tied_head_in_the_layout_of_modelopt_is_a_warning(
    layout: str, tied: bool, checkpoint: Make, planned: Any
) -> None:
    # vllm #45544: NotImplementedError of `tie_weights`
    config = QuantConfig.model_validate({"model": "m", "name": "out", "layout": layout})
    found = warnings(planned(checkpoint("llama", tie_word_embeddings=tied), layout=layout), config)
    assert any("tied" in line for line in found) == (tied and layout == "modelopt")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"format": "nvfp4"}, True),
        ({"format": "mxfp4"}, False),
        ({"format": "mxfp4", "ignore": ["*.layers.0.mlp.experts.*"]}, True),
        ({"format": "fp8", "act": "dynamic"}, False),
    ],
)
def test_experts_that_transformers_reads_wrong_are_a_warning(
    settings: dict[str, Any], told: bool, checkpoint: Make, planned: Any
) -> None:
    config = QuantConfig(model="m", name="out", **settings)
    assert (
        any("transformers" in line for line in warnings(planned(checkpoint("qwen3_moe"), **settings), config)) == told
    )


def test_a_full_disk_is_refused_before_anything_is_written(checkpoint: Make, dry: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(InputError, match=r"0\.0 GB are needed and 0\.0 GB free"):
        dry(checkpoint("llama"))
