"""Quantized checkpoints as models: weights as they stand in the files, inputs as the configuration says."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from mopdctl.engines.fp4 import dequantized, is_read_here, load_quantized, run_experts, scheme_of, stored_modules
from mopdctl.engines.hf import HFModel
from mopdctl.engines.weights import open_tensors
from mopdctl.errors import InputError
from mopdctl.fp4.fake import fake_quantize_activations
from mopdctl.fp4.nvfp4 import quantize
from mopdctl.fp4.quantized import Quantized, dequantize

TOKENS = torch.arange(3, 40).view(1, -1)


def write_quantized(source: Path, folder: Path, block: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """A copy of a checkpoint in which some tensors are others, with a quantization configuration."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text("utf-8")) | {"quantization_config": block}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    found = load_file(folder / "model.safetensors") | tensors
    save_file(
        {n: t for n, t in found.items() if t is not None}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    return folder


def block(inputs: Any = None, ignore: tuple[str, ...] = (), format: str = "nvfp4-pack-quantized") -> dict[str, Any]:
    group = {"targets": ["Linear"], "format": format, "weights": {}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def in_nvfp4(source: Path, names: list[str], *, inputs: float | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors of these modules in NVFP4, and what their weights then are."""
    before, tensors, weights = load_file(source / "model.safetensors"), {}, {}
    for name in names:
        made = quantize(before[f"{name}.weight"], 1000.0, method="max")
        tensors |= {
            f"{name}.weight": None,
            f"{name}.weight_packed": made.packed,
            f"{name}.weight_scale": made.scales.view(torch.float8_e4m3fn),
            f"{name}.weight_global_scale": torch.tensor([1000.0]),
        }
        if inputs is not None:
            tensors[f"{name}.input_global_scale"] = torch.tensor([inputs])
        weights[name] = dequantize(made)
    return tensors, weights


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


NAMES = [f"model.layers.{n}.{x}_proj" for n in range(2) for x in ("mlp.up", "mlp.down", "self_attn.q")]


def test_the_model_runs_on_the_values_that_the_codes_stand_for(tiny: Path, tmp_path: Path) -> None:
    source = tiny / "models" / "student"
    tensors, weights = in_nvfp4(source, NAMES)
    folder = write_quantized(source, tmp_path / "q", block(), tensors)
    plain = AutoModelForCausalLM.from_pretrained(source)
    for name, weight in weights.items():
        plain.get_submodule(name).weight.data.copy_(weight)
    model = HFModel.load(str(folder))
    assert torch.equal(logits(model.model), logits(plain))
    assert model.model.generation_config.eos_token_id == plain.generation_config.eos_token_id
    assert getattr(model.model.config, "quantization_config", None) is None
    assert not torch.equal(logits(plain), logits(AutoModelForCausalLM.from_pretrained(source)))


def test_weights_are_rounded_once_to_the_dtype_of_the_model(tiny: Path, tmp_path: Path) -> None:
    # compressed-tensors #839: dequantization was in bfloat16 whatever was asked for
    source = tiny / "models" / "student"
    tensors, weights = in_nvfp4(source, NAMES)
    folder = write_quantized(source, tmp_path / "q", block(), tensors)
    for dtype in (torch.float32, torch.bfloat16):
        model = load_quantized(str(folder), AutoConfig.from_pretrained(folder), dtype=dtype)
        for name, weight in weights.items():
            assert torch.equal(model.get_submodule(name).weight, weight.to(dtype))


def test_a_quantized_model_can_be_trained_further_and_saved_as_a_plain_one(tiny: Path, tmp_path: Path) -> None:
    source = tiny / "models" / "student"
    folder = write_quantized(source, tmp_path / "q", block(), in_nvfp4(source, NAMES)[0])
    model = HFModel.load(str(folder), train=True)
    model.model(TOKENS).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.model.parameters())
    model.save(tmp_path / "saved")
    assert torch.equal(logits(HFModel.load(str(tmp_path / "saved")).model), logits(HFModel.load(str(folder)).model))


@pytest.mark.parametrize("quantizes", [False, True])
def test_inputs_are_quantized_where_the_configuration_says_so(quantizes: bool, tiny: Path, tmp_path: Path) -> None:
    source, name = tiny / "models" / "student", "model.layers.1.mlp.down_proj"
    tensors, weights = in_nvfp4(source, [name], inputs=700.0)
    folder = write_quantized(source, tmp_path / "q", block({"dynamic": "local"} if quantizes else None), tensors)
    model = load_quantized(str(folder), AutoConfig.from_pretrained(folder), dtype=torch.float32)
    module, inputs = model.get_submodule(name), torch.randn(3, 64)
    entering = fake_quantize_activations(inputs, "nvfp4", 700.0) if quantizes else inputs
    assert torch.equal(module(inputs), entering @ weights[name].T)


def test_a_scale_of_inputs_that_is_missing_is_an_error(tiny: Path, tmp_path: Path) -> None:
    # vllm #45212: engines take what happens to be in memory
    source = tiny / "models" / "student"
    folder = write_quantized(source, tmp_path / "q", block({"dynamic": "local"}), in_nvfp4(source, NAMES)[0])
    with pytest.raises(InputError, match="has quantized inputs and no scale for them"):
        HFModel.load(str(folder))


def test_fp8_inputs_have_a_scale_for_each_token(tiny: Path, tmp_path: Path) -> None:
    source, name = tiny / "models" / "student", "model.layers.1.mlp.down_proj"
    weight = load_file(source / "model.safetensors")[f"{name}.weight"]
    tensors = {f"{name}.weight": weight.to(torch.float8_e4m3fn), f"{name}.weight_scale": torch.tensor([2.0])}
    inputs = {"dynamic": True, "strategy": "token"}
    folder = write_quantized(source, tmp_path / "q", block(inputs, format="float-quantized"), tensors)
    module = load_quantized(str(folder), AutoConfig.from_pretrained(folder), dtype=torch.float32).get_submodule(name)
    x = torch.randn(2, 64) * torch.tensor([[1.0], [1000.0]])
    scale = x.abs().amax(-1, keepdim=True) / 448
    rounded = (x / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(module(x), rounded @ (2 * weight.to(torch.float8_e4m3fn).float()).T)
    x.requires_grad_()
    module(x).sum().backward()
    assert torch.allclose(x.grad, module.weight.sum(0).expand(2, -1))  # straight through


@pytest.mark.parametrize("lost", ["weight_scale", "weight_global_scale"])
def test_a_module_that_lacks_a_tensor_is_an_error(lost: str, tiny: Path, tmp_path: Path) -> None:
    source, name = tiny / "models" / "student", "model.layers.1.mlp.down_proj"
    tensors, _ = in_nvfp4(source, [name])
    if lost == "weight_global_scale":  # without it the matrix would pass for MXFP4
        tensors[f"{name}.weight"] = tensors.pop(f"{name}.weight_packed")
    folder = write_quantized(source, tmp_path / "q", block(), tensors | {f"{name}.{lost}": None})
    with pytest.raises(InputError, match=f"without {name}.weight_"):
        stored_modules(open_tensors(str(folder)))


@pytest.mark.parametrize(
    ("shape", "strategy"), [((1,), "tensor"), ((), "tensor"), ((64, 1), "channel"), ((1, 1), "block")]
)
def test_fp8_of_any_granularity_is_read(shape: tuple[int, ...], strategy: str, tiny: Path, tmp_path: Path) -> None:
    source, name = tiny / "models" / "student", "model.layers.1.mlp.up_proj"
    codes, scale = torch.randn(64, 32).to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
    tensors = {f"{name}.weight": codes, f"{name}.weight_scale": scale}
    tensors_on_disk = open_tensors(str(write_quantized(source, tmp_path / "q", block(), tensors)))
    found = dequantized(tensors_on_disk, stored_modules(tensors_on_disk)[name], torch.float32)
    assert torch.equal(found, codes.float() * scale)


# ------------------------------------------------------------------------------------------------------------- experts


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("experts")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "initializer_range": 0.3}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=len(tiny_tokenizer), eos_token_id=1, **sizes, **moe))
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def test_experts_that_the_model_fuses_get_each_their_own_values(experts: Path, tmp_path: Path) -> None:
    names = [f"model.layers.0.mlp.experts.{e}.{x}_proj" for e in range(4) for x in ("gate", "up", "down")]
    tensors, weights = in_nvfp4(experts, names)
    folder = write_quantized(experts, tmp_path / "q", block(), tensors)
    module = HFModel.load(str(folder)).model.model.layers[0].mlp.experts
    for e in range(4):
        gate, up = (weights[f"model.layers.0.mlp.experts.{e}.{x}_proj"] for x in ("gate", "up"))
        assert torch.equal(module.gate_up_proj[e], torch.cat([gate, up]))
        assert torch.equal(module.down_proj[e], weights[f"model.layers.0.mlp.experts.{e}.down_proj"])


def test_experts_one_after_another_compute_what_the_model_does(experts: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(experts).model.layers[0].mlp.experts
    hidden, chosen = torch.randn(9, 32), torch.stack([torch.randperm(3)[:2] for _ in range(9)])  # none takes expert 3
    weights = torch.rand(9, 2)
    seen: list[tuple[str, int, int]] = []

    def enter(key: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        seen.append((key, expert, len(x)))
        return x

    found = run_experts(module, enter, hidden, chosen, weights)
    assert torch.allclose(found, module(hidden, chosen, weights), atol=1e-6)
    counts = [int((chosen == e).sum()) for e in range(3)]
    assert seen == [(key, e, counts[e]) for e in range(3) for key in ("gate_up_proj", "down_proj")]


def test_inputs_of_experts_are_quantized_one_by_one(experts: Path, tmp_path: Path) -> None:
    names = [f"model.layers.0.mlp.experts.{e}.{x}_proj" for e in range(4) for x in ("gate", "up", "down")]
    tensors, weights = in_nvfp4(experts, names, inputs=1.0)
    for number, name in enumerate(names):
        tensors[f"{name}.input_global_scale"] = torch.tensor([500.0 + 100 * (number // 3) + (number % 3 == 2)])
    folder = write_quantized(experts, tmp_path / "q", block({"dynamic": "local"}), tensors)
    module = HFModel.load(str(folder)).model.model.layers[0].mlp.experts
    hidden, expert = torch.randn(5, 32), 2
    found = module(hidden, torch.full((5, 1), expert), torch.ones(5, 1))
    gate, up, down = (weights[f"model.layers.0.mlp.experts.{expert}.{x}_proj"] for x in ("gate", "up", "down"))
    entering = fake_quantize_activations(hidden, "nvfp4", 700.0)
    inner = torch.nn.functional.silu(entering @ gate.T) * (entering @ up.T)
    assert torch.allclose(found, fake_quantize_activations(inner, "nvfp4", 701.0) @ down.T, atol=1e-5)


# ------------------------------------------------------------------------------------------------- what is read where


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (None, False),
        (block(), True),
        (block(format="mxfp4-pack-quantized"), True),
        (block(format="pack-quantized"), False),  # integers: left to transformers
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, True),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, False),
        ({"quant_method": "bitsandbytes"}, False),
    ],
)
def test_other_quantizations_are_left_to_transformers(found: Any, expected: bool) -> None:
    from types import SimpleNamespace

    assert is_read_here(SimpleNamespace(quantization_config=found)) == expected


def test_a_layers_own_name_comes_before_its_kind_and_ignore_before_both() -> None:
    linear, named = {"targets": ["Linear"]}, {"targets": ["a.b", r"re:^c\.\d$"]}
    config = {"config_groups": {"group_0": linear, "group_1": named}, "ignore": ["lm_head", "re:^d"]}
    assert scheme_of(config, "a.b") is named
    assert scheme_of(config, "c.7") is named
    assert scheme_of(config, "c.77") is linear
    assert scheme_of(config, "lm_head") is None
    assert scheme_of(config, "d.e") is None


def test_modelopt_scales_multiply(tiny: Path, tmp_path: Path) -> None:
    # modular #6600: the divisor of one layout was taken for the multiplier of the other
    source, name = tiny / "models" / "student", "model.layers.1.mlp.up_proj"
    made = quantize(load_file(source / "model.safetensors")[f"{name}.weight"], 1024.0, method="max")
    tensors = {
        f"{name}.weight": made.packed,
        f"{name}.weight_scale": made.scales.view(torch.float8_e4m3fn),
        f"{name}.weight_scale_2": torch.tensor(1 / 1024),
    }
    folder = write_quantized(source, tmp_path / "q", {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, tensors)
    found = HFModel.load(str(folder)).model.get_submodule(name).weight
    assert torch.equal(found, dequantize(Quantized("nvfp4", made.packed, made.scales, 1024.0)))
