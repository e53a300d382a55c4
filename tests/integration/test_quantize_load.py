"""Checkpoints that `mopdctl quantize` writes, as transformers and compressed-tensors 0.17 load them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from mopdctl.config.quant import QuantConfig
from mopdctl.engines.fp4 import dequantized, load_quantized, scheme_of, stored_modules
from mopdctl.engines.weights import open_tensors
from mopdctl.files import read_json, write_jsonl
from mopdctl.quant.run import quantize_model
from mopdctl.runs import Workspace

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
TOKENS = torch.arange(3, 60).view(1, -1)
MIXED = {
    "rules": [
        {"match": "*.self_attn.o_proj", "precision": "mxfp4"},
        {"match": "*.self_attn.*", "precision": "fp8"},
        {"match": "*.layers.1.mlp.down_proj", "precision": "bf16"},
    ]
}


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Callable[..., Path]:
    """Writes a tiny model in bfloat16 and quantizes it; returns the folder."""
    root = tmp_path_factory.mktemp("quantized")
    write_jsonl(root / "rows.jsonl", [{"text": f"What is {n} plus {n * n}? It is {n + n * n}."} for n in range(8)])

    def run(kind: str, tied: bool = False, **settings: Any) -> Path:
        source, name = root / f"{kind}-{tied}", f"out-{len(list(root.glob('workspace/checkpoints/*')))}"
        if not source.exists():
            ids = {"vocab_size": len(tiny_tokenizer), "eos_token_id": tiny_tokenizer.eos_token_id, "pad_token_id": 0}
            torch.manual_seed(0)
            config = CONFIG_MAPPING[kind](**SHAPE | ids | {"tie_word_embeddings": tied})
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(source)
            tiny_tokenizer.save_pretrained(source)
        document = {"model": str(source), "name": name, "method": "max"} | settings
        return quantize_model(QuantConfig.model_validate(document), Workspace(root / "workspace"), base=root)

    return run


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Compressed-tensors compiles the rounding of activations, which takes longer than all else here."""
    with torch.compiler.set_stance("force_eager"):
        yield


def transformers_logits(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits in bfloat16, and of the same weights in float32: compressed-tensors 0.17 decompresses to bfloat16."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert {key: found for key, found in info.items() if found} == {}
    with torch.no_grad():
        low = model(TOKENS).logits
        return low.float(), torch.nn.Module.float(model)(TOKENS).logits


def our_logits(folder: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits in bfloat16, of the same weights in float32, and of weights that were never rounded to bfloat16."""
    config = AutoConfig.from_pretrained(folder)
    with torch.no_grad():
        model = load_quantized(str(folder), config, dtype=torch.bfloat16).eval()
        low = model(TOKENS).logits
        exact = load_quantized(str(folder), config, dtype=torch.float32).eval()
        return low.float(), model.float()(TOKENS).logits, exact(TOKENS).logits


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"format": "nvfp4"}),
        ("llama", {"format": "nvfp4", "tied": True}),
        ("llama", {"format": "mxfp4", "act": "dynamic"}),
        ("llama", {"format": "nvfp4"} | MIXED),
        ("qwen3", {"format": "nvfp4", "method": "46"}),
        ("qwen3_moe", {"format": "mxfp4"}),
        pytest.param("qwen3", {"format": "mxfp4"}, marks=pytest.mark.slow),
        pytest.param(
            "qwen3_moe",
            {"format": "mxfp4", "rules": [{"match": "*.self_attn.*", "precision": "nvfp4"}]},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values()))[:40],
)
def test_transformers_computes_what_we_do(kind: str, settings: dict[str, Any], write: Callable[..., Path]) -> None:
    # compressed-tensors #532: MXFP4 could be written and not read
    folder = write(kind, **settings)
    (low, wide), (our_low, our_wide, exact) = transformers_logits(folder), our_logits(folder)
    assert torch.allclose(low, our_low, atol=1e-2)
    assert torch.equal(wide, our_wide)
    if settings["format"] == "mxfp4" and "rules" not in settings:  # bfloat16 holds every value of MXFP4
        assert torch.equal(exact, wide)


def test_transformers_quantizes_inputs_as_we_do(write: Callable[..., Path]) -> None:
    calibration = {"data": "rows.jsonl", "samples": 8, "max_length": 32}
    folder = write("qwen3", format="nvfp4", act="dynamic", calibration=calibration)
    (_, wide), (_, our_wide, _) = transformers_logits(folder), our_logits(folder)
    plain = our_logits(write("qwen3", format="nvfp4"))[1]
    assert (wide - our_wide).abs().max() < 0.1 * (wide - plain).abs().max()


def test_compressed_tensors_decompresses_experts_in_nvfp4_as_we_do(write: Callable[..., Path]) -> None:
    """Module by module: transformers 5.19 itself leaves out the tensor scale of experts."""
    tensors = open_tensors(str(folder := write("qwen3_moe", format="nvfp4")))
    block = read_json(folder / "config.json")["quantization_config"]
    parsed = QuantizationConfig.model_validate(json.loads(json.dumps(block)))
    experts = {name: one for name, one in stored_modules(tensors).items() if ".experts." in name}
    assert len(experts) == 2 * 4 * 3
    for name, module in experts.items():
        scheme = scheme_of(block, name)
        assert scheme is block["config_groups"]["group_0"]
        state = {tensor.rpartition(".")[2]: tensors.tensor(tensor) for tensor in module.tensors}
        compressor = BaseCompressor.get_value_from_registry(scheme["format"])
        found = compressor.decompress(state, parsed.config_groups["group_0"])["weight"]
        assert torch.equal(found, dequantized(tensors, module, torch.bfloat16)), name


@pytest.mark.slow
@pytest.mark.parametrize("format", ["nvfp4", "fp8"])
def test_scales_of_keys_and_values_find_their_place(format: str, write: Callable[..., Path]) -> None:
    # vllm #37214, #38303
    low, _ = transformers_logits(write("llama", format=format, kv_cache="fp8"))
    assert bool(low.isfinite().all())
