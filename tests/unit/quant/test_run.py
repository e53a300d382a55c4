"""A quantization from folder to folder: same bytes whatever happens on the way, and nothing lost or half done."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mopdctl.config.quant import QuantConfig
from mopdctl.engines.fp4 import dequantized, stored_modules
from mopdctl.engines.weights import open_tensors
from mopdctl.errors import CheckFailedError, InputError
from mopdctl.files import file_digest, read_json, write_jsonl
from mopdctl.quant import run
from mopdctl.quant.run import PROVENANCE, quantize_model
from mopdctl.quant.tensor import quantize_weight
from mopdctl.runs import Workspace, read_card

Make = Callable[..., Path]
UP = "model.layers.1.mlp.up_proj"


def digests(folder: Path) -> dict[str, str]:
    return {path.name: file_digest(path) for path in sorted(folder.iterdir())}


def settings(model: Path, **more: Any) -> QuantConfig:
    return QuantConfig.model_validate({"model": str(model), "name": "out", "method": "max"} | more)


# ------------------------------------------------------------------------------------------------------ what comes out


def test_all_that_lies_beside_the_weights_is_carried_over(checkpoint: Make, quantized: Callable[..., Path]) -> None:
    source = checkpoint("llama")
    folder = quantized(source, method="max")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (folder / name).read_bytes() == (source / name).read_bytes(), name
    config = read_json(folder / "config.json")
    assert config.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert config == read_json(source / "config.json")


def test_the_card_names_the_source_and_the_settings(checkpoint: Make, quantized: Callable[..., Path]) -> None:
    source = checkpoint("llama")
    card = read_card(quantized(source, method="max"))
    assert card["algorithm"] == "quantize/nvfp4"
    assert card["parent"] == str(source)
    assert card["config"]["settings"]["method"] == "max"
    assert card["digest"]
    assert card["fingerprint"]


def test_what_is_not_quantized_is_the_same_to_the_byte(checkpoint: Make, quantized: Callable[..., Path]) -> None:
    source = checkpoint("qwen3_moe")
    before, after = load_file(source / "model.safetensors"), load_file(quantized(source) / "model.safetensors")
    kept = before.keys() & after.keys()
    assert {name.rpartition(".")[0] for name in kept} > {"lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"}
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert all(after[name].dtype == torch.bfloat16 for name in kept)


def test_fused_layers_share_their_tensor_scale_and_experts_do_not(checkpoint: Make, quantized: Any) -> None:
    # llm-compressor #1869, vllm #55073
    found = load_file(quantized(checkpoint("qwen3_moe"), method="max") / "model.safetensors")
    scale = {name.removesuffix(".weight_global_scale"): float(t) for name, t in found.items() if "global_scale" in name}
    attention, experts = "model.layers.0.self_attn", "model.layers.0.mlp.experts"
    assert len({scale[f"{attention}.{x}_proj"] for x in "qkv"}) == 1
    assert all(scale[f"{experts}.{e}.gate_proj"] == scale[f"{experts}.{e}.up_proj"] for e in range(4))
    assert len({scale[f"{experts}.{e}.gate_proj"] for e in range(4)}) == 4


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "fp8"])
def test_a_weight_of_zeros_comes_out_as_zeros_with_sound_scales(format: str, editable: Make, quantized: Any) -> None:
    # ModelOpt 0.47 writes a tensor scale of 0 and block scales of NaN for it
    source = editable("llama", {f"{UP}.weight": torch.zeros(96, 64, dtype=torch.bfloat16)})
    tensors = open_tensors(str(quantized(source, format=format, method="max")))
    assert not dequantized(tensors, stored_modules(tensors)[UP], torch.float32).any()


def test_no_dtype_of_the_weights_changes_the_arithmetic(checkpoint: Make, editable: Make, quantized: Any) -> None:
    # compressed-tensors computes the tensor scale in the weight's dtype: 29696 instead of 29756.89
    source = checkpoint("llama")
    wide = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    one = load_file(quantized(source, "one") / "model.safetensors")
    other = load_file(quantized(editable("llama", wide), "other") / "model.safetensors")
    for name in one:
        if name.startswith(UP):
            assert torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)), name


def test_a_tied_table_is_written_once(checkpoint: Make, editable: Make, quantized: Callable[..., Path]) -> None:
    # Model-Optimizer 0.45, llm-compressor #2798: a second table under the name of the head
    table = load_file(checkpoint("llama", tie_word_embeddings=True) / "model.safetensors")["model.embed_tokens.weight"]
    folder = quantized(editable("llama", {"lm_head.weight": table}, tie_word_embeddings=True), method="max")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    config = read_json(folder / "config.json")
    assert config["tie_word_embeddings"] is True
    assert {"lm_head", "model.embed_tokens"} <= set(config["quantization_config"]["ignore"])


def test_a_table_that_is_tied_and_differs_is_refused(editable: Make, quantized: Callable[..., Path]) -> None:
    # transformers does not tie two that are there and differ; what is dropped here would be missing there
    table = torch.ones(512, 64, dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"lm_head\.weight: config.json ties it to model\.embed_tokens\.weight, and"):
        quantized(editable("llama", {"lm_head.weight": table}, tie_word_embeddings=True), method="max")


def test_shards_have_an_index_and_hold_the_same_tensors(checkpoint: Make, quantized: Callable[..., Path]) -> None:
    whole = load_file(quantized(checkpoint("llama"), "whole", method="max") / "model.safetensors")
    folder = quantized(checkpoint("llama"), "sharded", method="max", max_shard_gb=4e-5)
    index = read_json(folder / "model.safetensors.index.json")
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files == sorted(path.name for path in folder.glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    assert found.keys() == whole.keys() == index["weight_map"].keys()
    assert all(torch.equal(found[n].view(torch.uint8), whole[n].view(torch.uint8)) for n in found if found[n].ndim)


def test_a_source_in_shards_gives_the_same_weights(checkpoint: Make, tmp_path: Path, quantized: Any) -> None:
    from transformers import AutoModelForCausalLM

    source = checkpoint("llama")
    shutil.copytree(source, tmp_path / "shards")
    (tmp_path / "shards" / "model.safetensors").unlink()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    one = load_file(quantized(source, "one", method="max") / "model.safetensors")
    other = load_file(quantized(tmp_path / "shards", "other", method="max") / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(
        torch.equal(one[name].flatten().view(torch.uint8), other[name].flatten().view(torch.uint8)) for name in one
    )


# ------------------------------------------------------------------------------------------------- interrupted, resumed


def test_killed_anywhere_the_same_call_ends_with_the_same_bytes(checkpoint: Make, tmp_path: Path) -> None:
    # Model-Optimizer #1264: hours lost to a failure at the end
    config = settings(checkpoint("llama"), max_shard_gb=4e-5, kv_cache="fp8")
    whole = digests(quantize_model(config, Workspace(tmp_path / "whole"), base=tmp_path))
    place = Workspace(tmp_path / "killed")
    for after in (1, 6, 4, 9):
        killed = os.fork()
        if killed == 0:
            written = 0

            def die(done: int, total: int, name: str, after: int = after) -> None:
                nonlocal written
                written += 1
                if written == after:
                    os.kill(os.getpid(), signal.SIGKILL)

            quantize_model(config, place, base=tmp_path, on_tensor=die)
            os._exit(1)
        assert os.WTERMSIG(os.waitpid(killed, 0)[1]) == signal.SIGKILL
        assert not (tmp_path / "killed" / "checkpoints" / "out").exists()
    journal = (tmp_path / "killed" / "runs" / "out" / "journal.jsonl").read_text("utf-8")
    assert journal.count("\n") == 1 + 6 + 4 + 9
    written: list[str] = []
    target = quantize_model(config, place, base=tmp_path, on_tensor=lambda done, total, name: written.append(name))
    assert len(written) == 2  # of 7 tensors as they are, 14 modules and the cache's scales
    assert digests(target) == whole
    assert not (tmp_path / "killed" / "runs" / "out" / "parts").exists()


def test_what_is_written_is_not_computed_again(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, place, seen = settings(checkpoint("llama")), Workspace(tmp_path), []

    def counting(weight: torch.Tensor, *args: Any, **more: Any) -> Any:
        seen.append(weight.shape)
        return quantize_weight(weight, *args, **more)

    def stop(done: int, total: int, name: str) -> None:
        if done == total - 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(run, "quantize_weight", counting)
    with pytest.raises(KeyboardInterrupt):
        quantize_model(config, place, base=tmp_path, on_tensor=stop)
    assert len(seen) == 12
    quantize_model(config, place, base=tmp_path)
    assert len(seen) == 14


def test_a_failed_check_leaves_no_checkpoint_and_the_parts(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, place = settings(checkpoint("llama")), Workspace(tmp_path)

    def fail(*args: object, **more: object) -> None:
        raise CheckFailedError("no")

    with monkeypatch.context() as patched:
        patched.setattr(run, "check_checkpoint", fail)
        with pytest.raises(CheckFailedError):
            quantize_model(config, place, base=tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    written: list[str] = []
    quantize_model(config, place, base=tmp_path, on_tensor=lambda done, total, name: written.append(name))
    assert written == []


def test_a_finished_quantization_is_left_as_it_is(checkpoint: Make, tmp_path: Path) -> None:
    config = settings(checkpoint("llama"))
    target = quantize_model(config, Workspace(tmp_path), base=tmp_path)
    times = {path: path.stat().st_mtime_ns for path in target.iterdir()}
    assert quantize_model(config, Workspace(tmp_path), base=tmp_path) == target
    assert {path: path.stat().st_mtime_ns for path in target.iterdir()} == times


@pytest.mark.parametrize("begun", [False, True])
def test_other_settings_or_another_source_do_not_go_on(
    begun: bool, checkpoint: Make, editable: Make, tmp_path: Path
) -> None:
    def stop(done: int, total: int, name: str) -> None:
        if begun and done == 3:
            raise KeyboardInterrupt

    source, place = editable("llama"), Workspace(tmp_path)
    try:
        quantize_model(settings(source), place, base=tmp_path, on_tensor=stop)
    except KeyboardInterrupt:
        assert begun
    with pytest.raises(InputError, match=r"settings\.method .*use another name"):
        quantize_model(settings(source, method="sweep"), place, base=tmp_path)
    (source / "tokenizer_config.json").write_text("{}", "utf-8")
    with pytest.raises(InputError, match=r"source .*use another name"):
        quantize_model(settings(source), place, base=tmp_path)


def test_sizes_to_check_for_and_a_description_do_not_make_another_run(checkpoint: Make, tmp_path: Path) -> None:
    target = quantize_model(settings(checkpoint("llama")), Workspace(tmp_path), base=tmp_path)
    assert quantize_model(settings(checkpoint("llama"), tp=[2]), Workspace(tmp_path), base=tmp_path) == target


# --------------------------------------------------------------------------------------------------------- calibration


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, Any]:
    """Calibration on two short rows."""
    write_jsonl(tmp_path / "rows.jsonl", [{"text": "1 plus 2 is 3."}, {"text": "4"}])
    return {"data": str(tmp_path / "rows.jsonl"), "max_length": 8}


def test_every_expert_has_a_scale_of_its_inputs_also_one_that_no_token_reached(
    checkpoint: Make, quantized: Any, tmp_path: Path
) -> None:
    # vllm #45212: experts without input scales, and NaN from the first token that is routed to one
    write_jsonl(tmp_path / "rows.jsonl", [{"text": "1"}])
    source = checkpoint("qwen3_moe", num_experts=8)
    folder = quantized(source, act="dynamic", method="max", calibration={"data": str(tmp_path / "rows.jsonl")})
    found = load_file(folder / "model.safetensors")
    scales = {name.rpartition(".")[0]: tensor for name, tensor in found.items() if name.endswith("input_global_scale")}
    assert len(scales) == 2 * (4 + 8 * 3)
    assert all(tensor.isfinite() and tensor > 0 and tensor != 1 for tensor in scales.values())
    assert len({float(scales[f"model.layers.0.self_attn.{x}_proj"]) for x in "qkv"}) == 1
    down = sorted(float(scales[f"model.layers.0.mlp.experts.{e}.down_proj"]) for e in range(8))
    assert down[:7] == [down[0]] * 7  # the token reached two: the other six have the scale of the larger inputs
    assert down[7] > down[0]
    told = read_json(folder / PROVENANCE)
    assert sum(about["calibration_tokens"] == 0 for about in told["modules"].values()) == 2 * 6 * 3
    assert told["modules"]["model.layers.0.self_attn.q_proj"]["calibration_tokens"] > 0
    (line,) = [line for line in told["warnings"] if "no calibration token reached" in line]
    assert line.startswith("no calibration token reached 36 of 56 weights (model.layers.0.mlp.experts.")


@pytest.mark.parametrize("after", [30, 34, 44, 60])
def test_experts_that_no_token_reached_are_the_same_after_a_kill(checkpoint: Make, tmp_path: Path, after: int) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"text": "1"}])
    calibration = {"data": str(tmp_path / "rows.jsonl")}
    config = settings(
        checkpoint("qwen3_moe", num_experts=8), act="dynamic", method="max", format="nvfp4", calibration=calibration
    )
    whole = digests(quantize_model(config, Workspace(tmp_path / "whole"), base=tmp_path))

    def stop(done: int, total: int, name: str) -> None:
        if done == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(config, Workspace(tmp_path / "stopped"), base=tmp_path, on_tensor=stop)
    assert digests(quantize_model(config, Workspace(tmp_path / "stopped"), base=tmp_path)) == whole


def test_gptq_goes_on_where_it_was_with_the_same_bytes(checkpoint: Make, tmp_path: Path, rows: dict[str, Any]) -> None:
    config = settings(checkpoint("llama"), method="gptq", act="dynamic", calibration=rows)
    whole = digests(quantize_model(config, Workspace(tmp_path / "whole"), base=tmp_path))

    def stop(done: int, total: int, name: str) -> None:
        if done == total - 4:
            raise KeyboardInterrupt

    place = Workspace(tmp_path / "stopped")
    with pytest.raises(KeyboardInterrupt):
        quantize_model(config, place, base=tmp_path, on_tensor=stop)
    written: list[str] = []
    target = quantize_model(config, place, base=tmp_path, on_tensor=lambda done, total, name: written.append(name))
    assert len(written) == 4
    assert digests(target) == whole


def test_other_rows_do_not_go_on(checkpoint: Make, tmp_path: Path, rows: dict[str, Any]) -> None:
    config = settings(checkpoint("llama"), method="sweep", calibration=rows)
    target = quantize_model(config, Workspace(tmp_path), base=tmp_path)
    assert read_json(target / "mopdctl_quantization.json")["calibration"]["rows"] == 2
    write_jsonl(Path(rows["data"]), [{"text": "another"}])
    with pytest.raises(InputError, match=r"calibration.*use another name"):
        quantize_model(config, Workspace(tmp_path), base=tmp_path)


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.slow
def test_memory_stays_near_the_largest_tensor(tmp_path: Path, checkpoint: Make) -> None:
    """A model of 26 matrices of up to 33 MB: far less than all of them is ever in memory."""
    import subprocess
    import sys

    from safetensors.torch import save_file

    source = Path(shutil.copytree(checkpoint("llama"), tmp_path / "big"))
    config = read_json(source / "config.json") | {
        "num_hidden_layers": 4,
        "hidden_size": 2048,
        "intermediate_size": 8192,
    }
    config |= {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128}
    (source / "config.json").write_text(json.dumps(config), "utf-8")
    tensors = {f"model.layers.{n}.self_attn.{x}_proj.weight": (2048, 2048) for n in range(4) for x in "qkvo"}
    tensors |= {f"model.layers.{n}.mlp.{x}_proj.weight": (8192, 2048) for n in range(4) for x in ("gate", "up")}
    tensors |= {f"model.layers.{n}.mlp.down_proj.weight": (2048, 8192) for n in range(4)}
    save_file({name: torch.randn(shape).bfloat16() for name, shape in tensors.items()}, source / "model.safetensors")
    script = (
        "import resource, sys; from pathlib import Path; from mopdctl.config.quant import QuantConfig\n"
        "from mopdctl.quant.run import quantize_model; from mopdctl.runs import Workspace\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "config = QuantConfig(model=sys.argv[1], name='out', method='max')\n"
        "quantize_model(config, Workspace(Path(sys.argv[2])), base=Path())\n"
        "print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(source), str(tmp_path / "workspace")],
        capture_output=True,
        text=True,
        check=True,
    )
    before, after = map(int, done.stdout.split())
    assert (source / "model.safetensors").stat().st_size > 500e6
    assert (after - before) * 1024 < 2 * 8192 * 2048 * 2 + 200e6
