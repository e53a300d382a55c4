"""Which matrices are quantized, by the structure of the model and the names in its files; and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mopdctl.config.quant import load_recipe
from mopdctl.errors import InputError

Make = Callable[..., Path]
Planned = Callable[..., Any]

LAYER = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]


def precisions(plan: Any) -> dict[str, str]:
    return {name: module.precision for name, module in plan.modules.items()}


def test_linear_layers_are_quantized_and_embedding_and_head_are_not(checkpoint: Make, planned: Planned) -> None:
    plan = planned(checkpoint("llama"))
    linear = {f"model.layers.{n}.{name}": "nvfp4" for n in range(2) for name in LAYER}
    assert precisions(plan) == linear | {"model.embed_tokens": "bf16", "lm_head": "bf16"}
    assert {plan.modules[name].kept for name in plan.kept} == {"Embedding", "the output head"}
    norms = {name for name in plan.tensors.places if "norm" in name}
    assert set(plan.copied) == norms | {"model.embed_tokens.weight", "lm_head.weight"}


def test_routers_stay_though_they_are_no_linear_layers(checkpoint: Make, planned: Planned) -> None:
    # Model-Optimizer 0.45: routers of transformers 5 were missing from the excluded modules
    plan = planned(checkpoint("qwen3_moe"))
    routers = [f"model.layers.{n}.mlp.gate" for n in range(2)]
    assert {plan.modules[name].kept for name in routers} == {"Qwen3MoeTopKRouter"}
    assert set(routers) <= set(plan.kept)
    assert plan.modules["model.layers.0.mlp.experts.3.down_proj"].precision == "nvfp4"
    assert plan.modules["model.layers.0.mlp.experts.3.up_proj"].group == (
        "model.layers.0.mlp.experts.3.gate_proj",
        "model.layers.0.mlp.experts.3.up_proj",
    )


def test_linear_layers_that_choose_among_experts_stay(checkpoint: Make, planned: Planned) -> None:
    plan = planned(checkpoint("qwen2_moe", shared_expert_intermediate_size=32))
    assert plan.modules["model.layers.0.mlp.shared_expert_gate"].kept == "router"
    assert plan.modules["model.layers.0.mlp.shared_expert.up_proj"].precision == "nvfp4"


def test_names_are_those_of_the_files_not_of_the_model(checkpoint: Make, planned: Planned) -> None:
    # compressed-tensors 0.20: names of transformers 5 went into `ignore`, where files have others
    plan = planned(checkpoint("mixtral", num_local_experts=4))
    expert = "model.layers.0.block_sparse_moe.experts.1"
    assert plan.modules[f"{expert}.w1"].group == (f"{expert}.w1", f"{expert}.w3")
    assert "model.layers.0.block_sparse_moe.gate" in plan.kept


@pytest.mark.parametrize("name", ["mtp.fc", "mtp.layers.0.mlp.up_proj", "model.layers.2.self_attn.q_proj"])
def test_what_the_model_does_not_know_stays_and_is_ignored(name: str, editable: Make, planned: Planned) -> None:
    # vllm #38832, #44087, #49187, #57532: layers for multi-token prediction were left out of both
    plan = planned(editable("llama", {f"{name}.weight": torch.ones(32, 64, dtype=torch.bfloat16)}))
    assert plan.modules[name].precision == "bf16"
    assert name in plan.kept
    assert f"{name}.weight" in plan.copied


def test_state_space_layers_are_quantized_but_for_their_convolutions(checkpoint: Make, planned: Planned) -> None:
    kinds = ["mamba", "attention", "moe", "mlp"]
    sizes = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16, "n_routed_experts": 4}
    plan = planned(
        checkpoint(
            "nemotron_h",
            layers_block_type=kinds,
            num_hidden_layers=4,
            moe_shared_expert_intermediate_size=32,
            moe_intermediate_size=32,
            num_experts_per_tok=2,
            **sizes,
        ),
        **load_recipe("nemotron-3-ultra").model_dump(exclude={"description"}),
    )
    root = "backbone.layers" if "backbone.layers.0.mixer.in_proj" in plan.modules else "model.layers"
    found = {name.removeprefix(root): module.precision for name, module in plan.modules.items()}
    assert found[".0.mixer.in_proj"] == found[".0.mixer.out_proj"] == "fp8"
    assert found[".1.mixer.q_proj"] == found[".1.mixer.o_proj"] == "bf16"
    assert found[".2.mixer.experts.3.up_proj"] == found[".2.mixer.experts.0.down_proj"] == "nvfp4"
    assert found[".2.mixer.shared_experts.up_proj"] == "fp8"
    assert found[".2.mixer.gate"] == found[".3.mixer.up_proj"] == "bf16"
    assert f"{root}.0.mixer.conv1d.weight" in plan.copied
    assert plan.attention == (f"{root}.1.mixer",)


# -------------------------------------------------------------------------------------------------------------- ties


@pytest.mark.parametrize("twice", [False, True])
def test_a_tied_head_is_ignored_and_its_table_kept_once(twice: bool, editable: Make, planned: Planned) -> None:
    # Model-Optimizer 0.45, vllm #45543, llm-compressor #2798: a second table, or one end quantized
    table = torch.zeros(512, 64, dtype=torch.bfloat16)
    folder = editable("llama", {"lm_head.weight": table} if twice else None, tie_word_embeddings=True)
    plan = planned(folder, ignore=["lm_head"])
    assert "lm_head" in plan.kept
    assert plan.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if twice else {})
    assert "lm_head.weight" not in plan.copied
    assert "model.embed_tokens.weight" in plan.copied


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens"])
def test_no_end_of_a_tie_can_be_quantized(name: str, checkpoint: Make, planned: Planned) -> None:
    with pytest.raises(InputError, match=f"rule '{name}': nothing that it matches can be quantized"):
        planned(checkpoint("llama", tie_word_embeddings=True), rules=[{"match": name, "precision": "nvfp4"}])


def test_a_head_of_its_own_is_quantized_only_by_its_full_name(checkpoint: Make, planned: Planned) -> None:
    folder = checkpoint("llama")
    assert planned(folder, rules=[{"match": "*", "precision": "fp8"}]).modules["lm_head"].precision == "bf16"
    assert planned(folder, rules=[{"match": "lm_head", "precision": "fp8"}]).modules["lm_head"].precision == "fp8"


# ------------------------------------------------------------------------------------------------- patterns and rules


def test_the_first_rule_counts_and_ignore_comes_before_them(checkpoint: Make, planned: Planned) -> None:
    rules = [
        {"match": "*.layers.0.mlp.*", "precision": "fp8"},
        {"match": "*.mlp.*", "precision": "mxfp4"},
        {"match": "*.self_attn.o_proj", "precision": "bf16"},
    ]
    plan = planned(checkpoint("llama"), rules=rules, ignore=["*.0.mlp.down_proj"])
    found = {name.removeprefix("model.layers."): module for name, module in plan.modules.items()}
    assert found["0.mlp.up_proj"].precision == "fp8"
    assert found["1.mlp.up_proj"].precision == found["1.mlp.down_proj"].precision == "mxfp4"
    assert found["0.mlp.down_proj"].kept == "ignored by *.0.mlp.down_proj"
    assert found["1.self_attn.o_proj"].kept == "rule *.self_attn.o_proj"
    assert found["1.self_attn.q_proj"].precision == "nvfp4"


@pytest.mark.parametrize("key", ["ignore", "rules"])
def test_a_pattern_without_a_match_is_refused(key: str, checkpoint: Make, planned: Planned) -> None:
    value: list[Any] = ["*.mixer.*"] if key == "ignore" else [{"match": "*.mixer.*", "precision": "fp8"}]
    with pytest.raises(InputError, match=r"'\*\.mixer\.\*': matches no module"):
        planned(checkpoint("llama"), **{key: value})


def test_a_rule_for_a_router_is_refused(checkpoint: Make, planned: Planned) -> None:
    with pytest.raises(InputError, match=r"mlp\.gate: Qwen3MoeTopKRouter"):
        planned(checkpoint("qwen3_moe"), rules=[{"match": "*.mlp.gate", "precision": "nvfp4"}])


@pytest.mark.parametrize(
    ("kind", "ignore", "message"),
    [
        ("llama", "*.k_proj", "an engine fuses them into one"),
        ("qwen3_moe", "*.experts.1.*", "an engine runs all of model.layers.0.mlp.experts at once"),
        ("qwen3_moe", "*.experts.*.down_proj", "an engine runs all of"),
    ],
)
def test_a_part_of_what_is_fused_cannot_be_ignored(
    kind: str, ignore: str, message: str, checkpoint: Make, planned: Planned
) -> None:
    with pytest.raises(InputError, match=message):
        planned(checkpoint(kind), ignore=[ignore])


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({}, True),
        ({"format": "fp8"}, True),
        ({"format": "mxfp4"}, False),  # has no tensor scale that could differ
        ({"ignore": ["*.self_attn.*"]}, False),
        ({"fused": [["q_proj", "k_proj", "v_proj"]]}, False),
    ],
)
def test_siblings_of_an_unknown_family_are_refused_where_they_would_have_tensor_scales(
    settings: dict[str, Any], refused: bool, checkpoint: Make, planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    # auto-round #2380, #2379: a family that is in no list
    monkeypatch.setattr("mopdctl.engines.fusing.FUSED", (("gate_proj", "up_proj"),))
    if refused:
        with pytest.raises(InputError, match=r"layers\.0\.self_attn: .*fused: \[\["):
            planned(checkpoint("llama"), **settings)
    else:
        planned(checkpoint("llama"), **settings)


def test_everything_ignored_is_refused(checkpoint: Make, planned: Planned) -> None:
    with pytest.raises(InputError, match="nothing is left to quantize"):
        planned(checkpoint("llama"), ignore=["*"])


@pytest.mark.parametrize(("format", "width"), [("nvfp4", 24), ("mxfp4", 48)])
def test_widths_that_do_not_fall_into_blocks_are_refused_by_name(
    format: str, width: int, checkpoint: Make, planned: Planned
) -> None:
    block = {"nvfp4": 16, "mxfp4": 32}[format]
    with pytest.raises(InputError, match=rf"down_proj: {width} columns are no multiple of {block}.*--ignore"):
        planned(checkpoint("llama", intermediate_size=width), format=format)


# ---------------------------------------------------------------------------------------------------- quantized sources


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"model.layers.0.mlp.up_proj.weight": torch.zeros(96, 32, dtype=torch.uint8)}, "holds torch.uint8"),
        ({"model.layers.0.mlp.up_proj.weight": torch.zeros(96, 64).to(torch.float8_e4m3fn)}, "holds torch.float8"),
        ({"model.layers.0.mlp.up_proj.scale": torch.zeros(96, 2).to(torch.float8_e8m0fnu)}, "up_proj.scale"),
        ({"model.layers.0.mlp.up_proj.weight": torch.zeros(96, 32, dtype=torch.int8)}, "holds torch.int8"),
    ],
)
def test_weights_that_are_quantized_without_saying_so_are_refused(
    tensors: dict[str, Any], named: str, editable: Make, planned: Planned
) -> None:
    # vllm #43455: scales called `.scale` were missed, and experts quantized a second time
    with pytest.raises(InputError, match=named):
        planned(editable("llama", tensors))


def test_a_checkpoint_that_says_that_it_is_quantized_is_refused(quantized: Any, checkpoint: Make, planned: Any) -> None:
    folder = quantized(checkpoint("llama"), method="max")
    with pytest.raises(InputError, match="its weights are quantized already; quantize the checkpoint that it was made"):
        planned(folder)
