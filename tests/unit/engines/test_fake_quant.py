"""A model that reads its weights as FP4 holds them: what it computes, what it still owns, when values are made anew."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from mopdctl.engines import fake_quant
from mopdctl.engines.fake_quant import fake_quantize_weights, quantizable, quantize_weights
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.fp4 import mxfp4, nvfp4
from mopdctl.fp4.quantized import Format, dequantize
from mopdctl.train.muon import Muon

Make = Callable[..., Any]
FORMATS: list[Format] = ["nvfp4", "mxfp4"]
IDS = torch.tensor([[5, 9, 31, 7, 7, 12, 40, 3]])
SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
MOE = SMALL | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.fixture
def llama(make_llama: Make) -> Any:
    return make_llama(intermediate_size=64)


def moe() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE, initializer_range=0.2)).eval()


def in_fp4(weights: list[Tensor], format: Format, method: nvfp4.Method = "max") -> list[Tensor]:
    """The plain functions on matrices that share a divisor."""
    if format == "mxfp4":
        return [dequantize(mxfp4.quantize(weight, rule="even", method="max")) for weight in weights]
    divisor = nvfp4.divisor(max(float(weight.abs().max()) for weight in weights), method)
    return [dequantize(nvfp4.quantize(weight, divisor, method=method)) for weight in weights]


@torch.no_grad()
def by_hand(model: Any, format: Format, method: nvfp4.Method = "max") -> Any:
    """A copy of a Llama whose inner matrices are replaced by what they are in FP4."""
    twin = copy.deepcopy(model)
    for layer in twin.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for group in (
            [attention.q_proj, attention.k_proj, attention.v_proj],
            [attention.o_proj],
            [mlp.gate_proj, mlp.up_proj],
            [mlp.down_proj],
        ):
            for linear, value in zip(group, in_fp4([m.weight for m in group], format, method), strict=True):
                linear.weight.copy_(value)
    return twin


def gradients(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what was quantized, in order."""
    found: list[tuple[int, ...]] = []
    real = fake_quant.fake_quantize

    def counting(weight: Tensor, *args: Any, **options: Any) -> Tensor:
        found.append(tuple(weight.shape))
        return real(weight, *args, **options)

    monkeypatch.setattr(fake_quant, "fake_quantize", counting)
    return found


# ----------------------------------------------------------------------------------------------------- what it computes


@pytest.mark.parametrize("format", FORMATS)
def test_logits_are_those_of_a_model_with_dequantized_weights(llama: Any, format: Format) -> None:
    twin, plain = by_hand(llama, format), copy.deepcopy(llama)
    fake_quantize_weights(llama, format)
    with torch.no_grad():
        assert torch.equal(llama(IDS).logits, twin(IDS).logits)
        assert not torch.allclose(llama(IDS).logits, plain(IDS).logits, atol=1e-2)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_passes_straight_through(llama: Any, format: Format, checkpointing: bool) -> None:
    twin = by_hand(llama, format)
    fake_quantize_weights(llama, format)
    if checkpointing:
        llama.train()
        llama.gradient_checkpointing_enable()
    expected = gradients(twin)
    assert all(torch.equal(expected[name], gradient) for name, gradient in gradients(llama).items())
    assert all(gradient.any() for gradient in expected.values())


def test_the_gradient_of_one_layer_is_that_of_its_quantized_weight_in_closed_form() -> None:
    # L = sum(c * Q(W) x): dL/dW = c x^T, dL/dx = Q(W)^T c, whatever the rounding
    layer = torch.nn.Linear(32, 8, bias=False)
    parent = torch.nn.Module()
    parent.add_module("proj", layer)
    place = fake_quant.Place("proj.weight", layer, "weight")
    group = fake_quant._Group((place,), "nvfp4")
    x_K, c_R = torch.randn(32, requires_grad=True), torch.randn(8)
    (c_R * (group.read(0) @ x_K)).sum().backward()
    (value,) = in_fp4([layer.weight.detach()], "nvfp4")
    assert layer.weight.grad is not None
    assert x_K.grad is not None
    torch.testing.assert_close(layer.weight.grad, torch.outer(c_R, x_K.detach()), rtol=1e-6, atol=0)
    torch.testing.assert_close(x_K.grad, value.T @ c_R, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_layers_that_engines_fuse_share_the_divisor_of_the_largest(llama: Any) -> None:
    # llm-compressor #1869: g of q, k and v differed
    attention = llama.model.layers[0].self_attn
    attention.k_proj.weight.mul_(7.3)
    group = [attention.q_proj, attention.k_proj, attention.v_proj]
    weights = [module.weight.clone() for module in group]
    fake_quantize_weights(llama, "nvfp4")
    together, alone = in_fp4(weights, "nvfp4"), [in_fp4([weight], "nvfp4")[0] for weight in weights]
    for module, expected in zip(group, together, strict=True):
        assert torch.equal(module.weight, expected)
    assert not torch.equal(group[0].weight, alone[0])


@pytest.mark.parametrize("format", FORMATS)
@torch.no_grad()
def test_each_expert_is_a_matrix_of_its_own_and_the_router_stays(format: Format) -> None:
    model = moe()
    experts, router = model.model.layers[0].mlp.experts, model.model.layers[0].mlp.gate
    experts.gate_up_proj[2].mul_(9)
    weights, routing = experts.gate_up_proj.clone(), router.weight.clone()
    fake_quantize_weights(model, format)
    for expert in range(4):
        gate, up = weights[expert].chunk(2)
        assert torch.equal(experts.gate_up_proj[expert], torch.cat(in_fp4([gate, up], format)))
        assert torch.equal(experts.down_proj[expert], in_fp4([experts._parameters["down_proj"][expert]], format)[0])
    assert torch.equal(router.weight, routing)


def test_embedding_head_norms_and_routers_stay_as_they_are(llama: Any, make_llama: Make) -> None:
    named = [place.name for group in quantizable(llama) for place in group]
    linear = [n for n, p in llama.named_parameters() if p.dim() == 2 and "embed" not in n and "lm_head" not in n]
    assert sorted(named) == sorted(linear)
    tied = make_llama(tie_word_embeddings=True, intermediate_size=64)
    assert [[p.name for p in g] for g in quantizable(tied)] == [[p.name for p in g] for g in quantizable(llama)]
    found = {place.name.rpartition("layers.0.")[2] for group in quantizable(moe()) for place in group}
    assert {n for n in found if n.startswith("mlp")} == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}


def test_routers_and_small_projections_that_are_linear_layers_stay(llama: Any) -> None:
    # Model-Optimizer changelog 0.45: routers missing from the exclude list
    experts = moe().model.layers[0].mlp.experts
    for block in (llama.model.layers[0].mlp, llama.model.layers[1].mlp):
        block.experts = experts if block is llama.model.layers[0].mlp else torch.nn.ModuleList([torch.nn.SiLU()] * 4)
        block.anything, block.shared_expert_gate = torch.nn.Linear(32, 4), torch.nn.Linear(32, 1)
        block.in_proj_ba = torch.nn.Linear(32, 16)
        block.other = torch.nn.Linear(32, 8)
    named = {place.name for group in quantizable(llama) for place in group}
    assert not {name for name in named if "anything" in name or "shared" in name or "_ba" in name}
    assert {name for name in named if "other" in name} == {f"model.layers.{i}.mlp.other.weight" for i in range(2)}


def test_in_bfloat16_it_computes_with_what_a_loaded_checkpoint_would_hold(llama: Any) -> None:
    twin = by_hand(llama, "nvfp4").to(torch.bfloat16)
    linear = llama.model.layers[0].mlp.down_proj
    fake_quantize_weights(llama, "nvfp4")
    x_NK = torch.randn(3, 64)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear(x_NK)
    assert torch.equal(found, twin.model.layers[0].mlp.down_proj(x_NK.bfloat16()))


# -------------------------------------------------------------------------------------------------------- what it owns


def test_it_owns_the_weights_it_had_under_the_names_it_had(llama: Any, tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in llama.state_dict().items()}
    parameters = {name: id(parameter) for name, parameter in llama.named_parameters()}
    fake_quantize_weights(llama, "nvfp4")
    after = llama.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert {name: id(parameter) for name, parameter in llama.named_parameters()} == parameters
    llama(IDS)
    llama.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    assert list(loaded) == list(before)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in before.items())


def test_small_steps_add_up_in_the_weights_though_the_values_stand_still(llama: Any) -> None:
    fake_quantize_weights(llama, "mxfp4")
    module = llama.model.layers[0].self_attn.o_proj
    owned, before = module._parameters["weight"], module.weight.detach().clone()
    optimizer = torch.optim.SGD([owned], lr=1e-7)
    start = owned.detach().clone()
    for _ in range(3):
        owned.grad = torch.ones_like(owned)
        optimizer.step()
        assert (module.weight == before).float().mean() > 0.99
    assert not torch.equal(owned, start)


# ------------------------------------------------------------------------------------------- when values are made anew


def optimizers(parameters: list[Any]) -> dict[str, torch.optim.Optimizer]:
    return {
        "fused": torch.optim.AdamW(parameters, lr=1e-2, fused=True),
        "adamw": torch.optim.AdamW(parameters, lr=1e-2),
        "muon": Muon([p for p in parameters if p.dim() == 2], lr=1e-2),
    }


@pytest.mark.parametrize("name", ["fused", "adamw", "muon"])
def test_a_step_costs_one_quantization_of_each_weight(
    llama: Any, computed: list[tuple[int, ...]], name: str, tokenizer: Any
) -> None:
    fake_quantize_weights(llama, "nvfp4")
    matrices = sum(len(group) for group in quantizable(llama))
    optimizer = optimizers(list(llama.parameters()))[name]
    model = HFModel(llama, tokenizer)
    for steps in range(1, 4):
        model.score([((3, 4), (5, 6, 7))])  # as sampling and scoring do, without a gradient
        for _ in range(2):  # micro-batches
            llama(IDS, labels=IDS).loss.backward()
        assert len(computed) == steps * matrices
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("write", ["fused", "adamw", "muon", "load", "copy", "double"])
def test_no_value_outlives_the_weight_it_was_made_of(llama: Any, make_llama: Make, write: str) -> None:
    fake_quantize_weights(llama, "nvfp4")
    llama(IDS, labels=IDS).loss.backward()
    if write in ("fused", "adamw", "muon"):
        optimizers(list(llama.parameters()))[write].step()
    elif write == "load":
        llama.load_state_dict(make_llama(seed=1, intermediate_size=64).state_dict())
    elif write == "copy":
        with torch.no_grad():
            llama.state_dict()["model.layers.1.mlp.up_proj.weight"].mul_(2)
    else:
        llama.double()
    fresh = make_llama(intermediate_size=64).to(next(llama.parameters()).dtype)
    fresh.load_state_dict(llama.state_dict())
    fake_quantize_weights(fresh, "nvfp4")
    with torch.no_grad():
        assert torch.equal(llama(IDS).logits, fresh(IDS).logits)


def test_a_copy_reads_likewise_and_goes_its_own_way(llama: Any) -> None:
    fake_quantize_weights(llama, "nvfp4")
    before = llama(IDS).logits.detach()
    other = copy.deepcopy(llama).requires_grad_(False)
    assert torch.equal(other(IDS).logits, before)
    with torch.no_grad():
        for place in (place for group in quantizable(llama) for place in group):
            place.weight.add_(0.1)
    assert torch.equal(other(IDS).logits, before)
    assert not torch.equal(llama(IDS).logits, before)
    other.load_state_dict(llama.state_dict())
    assert torch.equal(other(IDS).logits, llama(IDS).logits)


# --------------------------------------------------------------------------------------------------------- for good


@pytest.mark.parametrize(("format", "method"), [("nvfp4", "sweep"), ("mxfp4", "max")])
def test_a_frozen_model_holds_what_fp4_makes_of_its_checkpoint(
    make_llama: Make, tokenizer: Any, tmp_path: Path, format: Format, method: nvfp4.Method
) -> None:
    model = make_llama(intermediate_size=64)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    expected = by_hand(model, format, method).state_dict()
    for dtype in ("float32", "bfloat16"):
        loaded = HFModel.load(str(tmp_path), dtype=dtype)
        quantize_weights(loaded, str(tmp_path), format)
        found = loaded.model.state_dict()
        # The scales are those of the file's own precision, the values rounded once: as if FP4 had been loaded.
        assert all(torch.equal(found[name], tensor.to(found[name].dtype)) for name, tensor in expected.items())
        assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_experts_are_quantized_for_good_too(tokenizer: Any, tmp_path: Path) -> None:
    model = moe()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = HFModel.load(str(tmp_path))
    quantize_weights(loaded, str(tmp_path), "mxfp4")
    fake_quantize_weights(model, "mxfp4")  # by the same rule
    with torch.no_grad():
        assert torch.equal(loaded.model(IDS).logits, model(IDS).logits)


# ------------------------------------------------------------------------------------------------------------- refused


def test_a_width_that_is_not_whole_blocks_is_refused_by_name(make_llama: Make) -> None:
    model = make_llama(intermediate_size=48)
    with pytest.raises(InputError, match=r"model\.layers\.0\.mlp\.down_proj\.weight has 48 columns, and mxfp4 needs"):
        fake_quantize_weights(model, "mxfp4")
    assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    fake_quantize_weights(model, "nvfp4")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(llama: Any, value: float) -> None:
    fake_quantize_weights(llama, "nvfp4")
    with torch.no_grad():
        llama.model.layers[1].mlp._modules["up_proj"]._parameters["weight"][3, 3] = value
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.gate_proj\.weight, .*up_proj\.weight: "):
        llama(IDS)


def test_experts_stored_the_other_way_round_are_refused() -> None:
    with torch.device("meta"):
        model = GptOssForCausalLM(GptOssConfig(**SMALL, num_local_experts=4))
    with pytest.raises(InputError, match="the experts of GptOssExperts are stored input by output"):
        quantizable(model)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_siblings_of_an_unknown_family_are_refused_where_they_have_tensor_scales(
    llama: Any, format: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as `mopdctl quantize` does (auto-round #2380, #2379)
    monkeypatch.setattr("mopdctl.engines.fusing.FUSED", (("gate_proj", "up_proj"),))
    if format == "nvfp4":
        with pytest.raises(InputError, match=r"layers\.0\.self_attn\.q_proj, .*v_proj.* may read one input"):
            fake_quantize_weights(llama, format)
    else:
        fake_quantize_weights(llama, format)


def test_a_model_without_linear_layers_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    with (
        torch.device("meta"),
        pytest.raises(InputError, match="has no linear layers to quantize"),
    ):
        quantizable(GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2)))


def test_a_checkpoint_that_is_quantized_already_is_refused(
    make_llama: Make, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_llama(intermediate_size=64).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = HFModel.load(str(tmp_path))
    config = type(model.model.config).from_pretrained(tmp_path)
    config.quantization_config = {"quant_method": "compressed-tensors"}
    config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="quantized already; leave out `quant`"):
        quantize_weights(model, str(tmp_path), "nvfp4")
