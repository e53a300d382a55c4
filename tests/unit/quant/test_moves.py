import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from mopdctl.config.quant import PrecisionRule, QuantConfig
from mopdctl.engines.fp4 import dequantized, load_quantized, stored_modules
from mopdctl.engines.weights import open_tensors
from mopdctl.errors import InputError
from mopdctl.files import read_json, write_json
from mopdctl.quant.moves import is_move, move_checkpoint, plan_move
from mopdctl.quant.run import PROVENANCE, quantize_model
from mopdctl.runs import Workspace, read_card

Moved = Callable[..., Path]


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory, write_tiny_model: Callable[..., Path]) -> Workspace:
    """A model whose matrices fall into blocks of 128 x 128, in MXFP4, NVFP4, and MXFP4 beside FP8."""
    root = tmp_path_factory.mktemp("moves")
    write_tiny_model(root / "model", hidden_size=256, intermediate_size=384, num_hidden_layers=1)
    space = Workspace(root / "workspace")
    for name, settings in {
        "mxfp4": {"format": "mxfp4", "method": "max"},
        "nvfp4": {"format": "nvfp4", "method": "max"},
        "mixed": {"format": "mxfp4", "method": "max", "rules": [PrecisionRule(match="*self_attn*", precision="fp8")]},
    }.items():
        quantize_model(QuantConfig(model=str(root / "model"), name=name, **settings), space, base=root)  # type: ignore[arg-type]
    return space


@pytest.fixture
def moved(space: Workspace) -> Moved:
    """Moves a checkpoint of the workspace."""

    def move(model: str, format: str, name: str, **settings: Any) -> Path:
        return move_checkpoint(QuantConfig(model=model, name=name, format=format, **settings), space, base=space.root)  # type: ignore[arg-type]

    return move


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Module to its dequantized weight."""
    tensors = open_tensors(str(folder))
    return {name: dequantized(tensors, module, torch.float32) for name, module in stored_modules(tensors).items()}


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def altered(space: Workspace, name: str, source: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a checkpoint with other tensors."""
    folder = space.checkpoint(name)
    folder.mkdir()
    tensors = load_file(space.checkpoint(source) / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_json(folder / "config.json", read_json(space.checkpoint(source) / "config.json"))
    return folder


@pytest.mark.parametrize(("source", "format"), [("mxfp4", "nvfp4"), ("mxfp4", "fp8"), ("mixed", "nvfp4")])
def test_weights_move_to_the_bit_and_all_else_is_carried_over(
    space: Workspace, moved: Moved, source: str, format: str
) -> None:
    folder = moved(source, format, f"{source}-to-{format}")
    before, after = weights_of(space.checkpoint(source)), weights_of(folder)
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert torch.equal(bits(values), bits(after[name])), name
    parts = {t for m in stored_modules(open_tensors(str(space.checkpoint(source)))).values() for t in m.tensors}
    old, new = (load_file(path / "model.safetensors") for path in (space.checkpoint(source), folder))
    for name in old.keys() - parts:
        assert torch.equal(old[name], new[name])
    assert {p.name for p in folder.iterdir()} == {p.name for p in space.checkpoint(source).iterdir()}
    told = read_card(folder)["move"]
    assert (told["exact_weights"], told["rounded_blocks"], told["rounded"]) == (told["weights"], 0, {})
    assert told["weights"] == (3 if source == "mixed" else 7)
    assert read_card(folder)["algorithm"] == f"move/{format}"


def test_nibbles_are_the_same_bytes_and_fused_layers_share_the_divisor(space: Workspace, moved: Moved) -> None:
    folder = moved("mxfp4", "nvfp4", "nibbles")
    old, new = (load_file(path / "model.safetensors") for path in (space.checkpoint("mxfp4"), folder))
    for name in (name for name in old if name.endswith(".weight_packed")):
        assert torch.equal(old[name], new[name])
    layer = "model.layers.0.self_attn"
    divisors = {float(new[f"{layer}.{one}_proj.weight_global_scale"]) for one in "qkv"}
    assert len(divisors) == 1
    tops = [new[f"{layer}.{one}_proj.weight_scale"].float().max().item() for one in "qkv"]
    assert max(tops) == 256


def test_a_sibling_with_small_weights_moves_under_the_divisor_of_its_group(space: Workspace, moved: Moved) -> None:
    # llm-compressor #1869, vllm #55073: siblings with divisors of their own
    name = "model.layers.0.self_attn.k_proj"

    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{name}.weight_scale"] -= 9

    source = altered(space, "small-k", "mxfp4", shrink)
    folder = moved("small-k", "nvfp4", "small-k-nvfp4")
    new = load_file(folder / "model.safetensors")
    query = float(new["model.layers.0.self_attn.q_proj.weight_global_scale"])
    assert float(new[f"{name}.weight_global_scale"]) == query
    assert torch.equal(bits(weights_of(source)[name]), bits(weights_of(folder)[name]))
    assert new[f"{name}.weight_scale"].float().max().item() < 1


def test_what_does_not_fit_is_rounded_and_told_by_name(space: Workspace, moved: Moved) -> None:
    name = "model.layers.0.mlp.down_proj"

    def spread(tensors: dict[str, torch.Tensor]) -> None:
        scales = tensors[f"{name}.weight_scale"]
        scales[0, 0] = int(scales.max()) - 18
        scales[5, 3] = int(scales.max()) - 30

    source = altered(space, "wide", "mxfp4", spread)
    for format, blocks in (("nvfp4", 4), ("fp8", 1)):
        folder = moved("wide", format, f"wide-{format}")
        told = read_card(folder)["move"]
        assert list(told["rounded"]) == [name]
        assert told["rounded"][name]["rounded_blocks"] == told["rounded_blocks"] == blocks
        assert told["exact_weights"] == 6
        before, after = weights_of(source)[name], weights_of(folder)[name]
        changed = (before != after).nonzero()
        assert 0 < len(changed) == told["changed_elements"] <= 64
        assert {(int(row), int(column) // 32) for row, column in changed} <= {(0, 0), (5, 3)}
        assert read_json(folder / PROVENANCE)["modules"][name]["move"] == told["rounded"][name]


def test_scales_of_fp8_are_powers_of_two_of_128_by_128(moved: Moved) -> None:
    new = load_file(moved("mxfp4", "fp8", "powers") / "model.safetensors")
    scales = new["model.layers.0.mlp.up_proj.weight_scale"]
    assert (scales.dtype, list(scales.shape)) == (torch.float32, [3, 2])
    assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))


def test_nvfp4_moves_to_fp8_with_every_exception_counted(space: Workspace, moved: Moved) -> None:
    folder = moved("nvfp4", "fp8", "nvfp4-to-fp8")
    before, after = weights_of(space.checkpoint("nvfp4")), weights_of(folder)
    told = read_card(folder)["move"]
    assert told["changed_elements"] == sum(int((before[name] != after[name]).sum()) for name in before)
    for name, values in before.items():
        assert (
            float((values - after[name]).norm() / values.norm()) < 0.04
        )  # half a step of three mantissa bits, uniform: 0.036


@pytest.mark.parametrize(("source", "format"), [("mxfp4", "nvfp4"), ("mxfp4", "fp8"), ("mixed", "nvfp4")])
def test_compressed_tensors_itself_reads_what_was_moved(
    space: Workspace, moved: Moved, source: str, format: str
) -> None:
    folder = moved(source, format, f"{source}-to-{format}")
    config = QuantizationConfig.model_validate(read_json(folder / "config.json")["quantization_config"])
    formats = {group.format for group in config.config_groups.values()}
    assert config.format == (formats.copy().pop() if len(formats) == 1 else "mixed-precision")
    name = "model.layers.0.mlp.up_proj"
    scheme = next(g for g in config.config_groups.values() if g.format != "float-quantized" or format == "fp8")
    new = load_file(folder / "model.safetensors")
    mine = {key.removeprefix(f"{name}."): value for key, value in new.items() if key.startswith(f"{name}.")}
    found = BaseCompressor.get_value_from_registry(scheme.format).decompress(mine, scheme)["weight"]
    expected = weights_of(space.checkpoint(source))[name]
    assert torch.equal(found.float(), expected.to(found.dtype).float())


def test_a_model_computes_the_same_from_either_format(space: Workspace, moved: Moved) -> None:
    ids = torch.arange(3, 19).unsqueeze(0)
    logits = []
    for folder in (space.checkpoint("mxfp4"), moved("mxfp4", "nvfp4", "same-nvfp4"), moved("mxfp4", "fp8", "same-fp8")):
        model = load_quantized(str(folder), AutoConfig.from_pretrained(folder), dtype=torch.float32)
        logits.append(model(ids).logits)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_inputs_of_fp8_can_be_quantized_in_groups(moved: Moved) -> None:
    block = read_json(moved("mxfp4", "fp8", "w8a8", act="dynamic") / "config.json")["quantization_config"]
    inputs = block["config_groups"]["group_0"]["input_activations"]
    assert (inputs["strategy"], inputs["group_size"], inputs["dynamic"]) == ("group", 128, True)
    QuantizationConfig.model_validate(block)


def test_a_move_that_was_stopped_ends_with_the_same_bytes(space: Workspace, moved: Moved) -> None:
    # Model-Optimizer #1264: hours lost at the end of a run
    whole = moved("mxfp4", "nvfp4", "whole")
    config = QuantConfig(model="mxfp4", name="stopped", format="nvfp4")

    class StopError(Exception):
        pass

    def stop(done: int, total: int, name: str) -> None:
        if done == total - 3:
            raise StopError

    with pytest.raises(StopError):
        move_checkpoint(config, space, base=space.root, on_tensor=stop)
    assert not space.checkpoint("stopped").exists()
    with pytest.raises(InputError, match="was begun with another configuration"):
        move_checkpoint(config.model_copy(update={"format": "fp8"}), space, base=space.root)
    again: list[str] = []
    folder = move_checkpoint(config, space, base=space.root, on_tensor=lambda done, total, name: again.append(name))
    assert len(again) == len(set(again))
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    assert not (space.run("stopped") / "parts").exists()
    stamp = (folder / "card.json").stat().st_mtime_ns
    move_checkpoint(config, space, base=space.root)
    assert (folder / "card.json").stat().st_mtime_ns == stamp


def test_several_files_hold_the_same_tensors(space: Workspace, moved: Moved) -> None:
    one, many = moved("mxfp4", "nvfp4", "one-file"), moved("mxfp4", "nvfp4", "many-files", max_shard_gb=2e-4)
    assert len(list(many.glob("model-*.safetensors"))) > 2
    assert read_json(many / "model.safetensors.index.json")["weight_map"].keys() == open_tensors(str(one)).places.keys()
    for name, values in weights_of(one).items():
        assert torch.equal(values, weights_of(many)[name])


def test_a_dry_run_says_what_would_move_and_writes_nothing(space: Workspace) -> None:
    config = QuantConfig(model="mixed", name="dry", format="nvfp4")
    before = sorted(space.root.rglob("*"))
    found = plan_move(config, space, base=space.root)
    assert (found["move"], found["modules"]) == ("nvfp4", 3)
    assert sorted(space.root.rglob("*")) == before
    assert is_move(config, space, base=space.root)
    assert not is_move(config.model_copy(update={"model": "../model"}), space, base=space.root)


@pytest.mark.parametrize(
    ("model", "settings", "problem"),
    [
        ("mxfp4", {"format": "mxfp4"}, "moves to nvfp4 or fp8, not to mxfp4; quantize its source instead"),
        ("nvfp4", {"format": "nvfp4"}, "has no mxfp4 weight that could move to nvfp4"),
        ("mxfp4", {"method": "max"}, "only changes its format, so that `method` means nothing"),
        ("mxfp4", {"ignore": ["*mlp*"]}, "only changes its format, so that `ignore` means nothing"),
        ("mxfp4", {"kv_cache": "fp8"}, "only changes its format, so that `kv_cache` means nothing"),
    ],
)
def test_what_means_nothing_for_a_move_is_refused(
    space: Workspace, moved: Moved, model: str, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InputError) as refused:
        moved(model, name="refused", **{"format": "nvfp4"} | settings)
    assert problem in str(refused.value)
    assert not space.run("refused").exists()


def test_nvfp4_inputs_need_calibration(space: Workspace) -> None:
    config = QuantConfig(model="mxfp4", name="refused", format="nvfp4").model_copy(update={"act": "dynamic"})
    with pytest.raises(InputError, match="scales of NVFP4 inputs come from calibration"):
        move_checkpoint(config, space, base=space.root)


def test_checkpoints_of_other_kinds_are_refused(space: Workspace, moved: Moved, write_tiny_model: Any) -> None:
    folder = altered(space, "foreign", "mxfp4", lambda tensors: None)
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", config | {"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(InputError, match="quantized as 'gptq'; only compressed-tensors checkpoints move"):
        moved("foreign", "nvfp4", "refused")
    block = json.loads(json.dumps(config["quantization_config"]).replace("mxfp4-pack", "nvfp4-pack"))
    write_json(folder / "config.json", config | {"quantization_config": block})
    with pytest.raises(InputError, match=r"_proj: is mxfp4, and config.json says nvfp4; repair it"):
        moved("foreign", "nvfp4", "refused")

    def native(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.experts.down_proj_blocks"] = torch.zeros(2, 4, 1, 16, dtype=torch.uint8)

    altered(space, "gpt-oss", "mxfp4", native)
    with pytest.raises(InputError, match=r"down_proj_blocks holds all experts of a layer as gpt-oss stores them"):
        moved("gpt-oss", "nvfp4", "refused")


def test_shapes_that_readers_would_cut_otherwise_do_not_move_to_fp8(
    space: Workspace, moved: Moved, write_tiny_model: Any
) -> None:
    write_tiny_model(space.root / "narrow", num_hidden_layers=1)
    source = QuantConfig(model=str(space.root / "narrow"), name="narrow", format="mxfp4", method="max")
    quantize_model(source, space, base=space.root)
    with pytest.raises(InputError, match=r"down_proj: 32 x 64 does not divide into blocks of 128 x 128"):
        moved("narrow", "fp8", "refused")
    assert moved("narrow", "nvfp4", "narrow-nvfp4").is_dir()


def test_a_matrix_of_one_block_is_not_taken_for_one_with_a_tensor_scale(
    space: Workspace, moved: Moved, write_tiny_model: Any
) -> None:
    # Of fused layers each keeps the scales of its own blocks, be it one block.
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    write_tiny_model(space.root / "square", num_hidden_layers=1, **sizes)
    source = QuantConfig(model=str(space.root / "square"), name="square", format="mxfp4", method="max")
    quantize_model(source, space, base=space.root)
    before, after = weights_of(space.checkpoint("square")), weights_of(moved("square", "fp8", "square-fp8"))
    assert all(bits(after[name]).equal(bits(weight)) for name, weight in before.items())


def test_a_broken_scale_is_named(space: Workspace, moved: Moved) -> None:
    # vllm-omni #4025
    name = "model.layers.0.mlp.gate_proj"

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{name}.weight_scale"][3, 1] = 255

    altered(space, "broken", "mxfp4", damage)
    with pytest.raises(InputError, match=rf"{name}: MXFP4 scale byte 255 \(NaN\) in 1 blocks"):
        moved("broken", "nvfp4", "refused-broken")
    assert not space.checkpoint("refused-broken").exists()


def test_the_counts_are_finite_and_add_up(moved: Moved) -> None:
    folder = moved("mxfp4", "fp8", "counts")
    told, modules = read_card(folder)["move"], read_json(folder / PROVENANCE)["modules"]
    for name in ("blocks", "elements", "changed_elements"):
        assert told[name] == sum(one["move"][name] for one in modules.values())
    assert math.isfinite(told["blocks"])
    assert {one["precision"] for one in modules.values()} == {"fp8"}


@pytest.mark.slow
@pytest.mark.parametrize("format", ["nvfp4", "fp8"])
def test_transformers_with_compressed_tensors_gives_the_same_logits(moved: Moved, format: str) -> None:
    folder = moved("mxfp4", format, f"mxfp4-to-{format}")
    ids = torch.arange(3, 19).unsqueeze(0)
    ours = load_quantized(str(folder), AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)(ids).logits
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)(ids).logits
    assert torch.equal(ours, theirs)
