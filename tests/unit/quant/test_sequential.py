"""A model that runs layer by layer computes what it computes whole, and what its modules read is counted exactly."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from mopdctl.engines.weights import open_tensors
from mopdctl.errors import InputError
from mopdctl.fp4 import nvfp4
from mopdctl.quant.layerwise import LayerwiseModel, run_layer
from mopdctl.quant.moments import Moments
from mopdctl.quant.sequential import batches, calibrate

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

MADE: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **EXPERTS)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4)),
    # Scales its embeddings, and gives layers that slide another mask than the others.
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, sliding_window=4)),
    # Its layers return tuples.
    "bloom": lambda: BloomForCausalLM(BloomConfig(vocab_size=40, hidden_size=16, n_layer=3, n_head=2)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=3, n_head=2, n_positions=64)),
}
ROWS = [[5, 9, 31, 7, 7, 12, 3], [4, 8, 15], [16, 23, 42 % 40, 2, 39, 11, 6], [1, 2, 3], [20, 30]]
CPU = torch.device("cpu")


def build(kind: str, folder: Path, *, change: Callable[[Any], None] = lambda model: None) -> tuple[Any, str]:
    """A model as transformers loads it from a folder, and that folder."""
    torch.manual_seed(0)
    model = MADE[kind]().eval()
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    return loaded, str(folder)


def linears(path: str) -> list[str]:
    """All matrices in decoder layers that are no router's."""
    places = open_tensors(path).places
    names = [name for name, place in places.items() if ".layers." in name and len(place.shape) == 2]
    return [name.removesuffix(".weight") for name in names if not name.endswith(".gate.weight")]


def moments_of(path: str, targets: list[str], *, rows: list[list[int]] = ROWS, **options: Any) -> dict[str, Moments]:
    found: dict[str, Moments] = {}

    def visit(moments: Mapping[str, Moments]) -> dict[str, Tensor]:
        found.update(moments)
        return {}

    calibrate(LayerwiseModel(open_tensors(path), CPU), rows, targets, visit, **options)
    return found


@torch.no_grad()
def inputs_of(model: Any, names: list[str]) -> dict[str, Tensor]:
    """What some modules of the whole model read, each [N, K]."""
    seen: dict[str, list[Tensor]] = {name: [] for name in names}

    def hook(name: str) -> Callable[..., None]:
        return lambda module, args: seen[name].append(args[0].flatten(0, -2))

    hooks = [model.get_submodule(name).register_forward_pre_hook(hook(name)) for name in names]
    for row in ROWS:
        model(torch.tensor([row]))
    for one in hooks:
        one.remove()
    return {name: torch.cat(inputs) for name, inputs in seen.items()}


# ----------------------------------------------------------------------------------------------------- layer by layer


@pytest.mark.parametrize("kind", MADE)
@torch.no_grad()
def test_layer_by_layer_gives_the_hidden_states_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    whole, path = build(kind, tmp_path)
    model = LayerwiseModel(open_tensors(path), CPU)
    ids_BT = torch.tensor([ROWS[0], ROWS[2]])
    hidden_BTH, calls = model.embed(ids_BT)
    for number, call in enumerate(calls):
        hidden_BTH = run_layer(model.load(number), hidden_BTH, call)
        model.drop(number)
    expected_BTH = whole.base_model(ids_BT).last_hidden_state
    torch.testing.assert_close(model.finish(ids_BT, hidden_BTH), expected_BTH, atol=1e-6, rtol=1e-6)
    assert expected_BTH.std() > 0.1


def test_no_two_layers_have_weights_at_a_time(tmp_path: Path) -> None:
    _, path = build("qwen3_moe", tmp_path)
    model = LayerwiseModel(open_tensors(path), CPU)

    def loaded() -> list[bool]:
        return [any(not p.is_meta for p in layer.parameters()) for layer in model.layers]

    seen: list[list[bool]] = []

    def visit(moments: Mapping[str, Moments]) -> dict[str, Tensor]:
        seen.append(loaded())
        return {}

    calibrate(model, ROWS, linears(path), visit)
    assert seen == [[True, False, False], [False, True, False], [False, False, True]]
    assert loaded() == [False] * 3


def test_a_missing_or_misshapen_tensor_is_named(tmp_path: Path) -> None:
    _, path = build("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    gone = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file)
    with pytest.raises(InputError, match=r"tensors of model\.layers\.1\.mlp\.up_proj\.weight are missing"):
        moments_of(path, ["model.layers.2.mlp.up_proj"])
    save_file(tensors | {"model.layers.1.mlp.up_proj.weight": gone[:, :8].contiguous()}, file)
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.up_proj\.weight are missing or of another shape"):
        moments_of(path, ["model.layers.2.mlp.up_proj"])


def test_a_model_that_does_more_between_its_layers_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = build("llama", tmp_path)
    from transformers.models.llama.modeling_llama import LlamaModel

    def forward(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden) / 2
        raise AssertionError("the first layer's output went unnoticed")

    monkeypatch.setattr(LlamaModel, "forward", forward)
    with pytest.raises(InputError, match="LlamaForCausalLM does something to its hidden states between two"):
        LayerwiseModel(open_tensors(path), CPU)


def test_a_target_outside_the_layers_is_refused(tmp_path: Path) -> None:
    _, path = build("llama", tmp_path)
    with pytest.raises(InputError, match=r"model\.embed_tokens: is in no decoder layer"):
        moments_of(path, ["model.embed_tokens", "model.layers.0.mlp.up_proj"])


# -------------------------------------------------------------------------------------------------------------- moments


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_moments_are_those_of_the_inputs_in_the_whole_model(kind: str, tmp_path: Path) -> None:
    whole, path = build(kind, tmp_path)
    found = moments_of(path, linears(path), hessian=True)
    assert len(found) == 3 * 7
    for name, inputs_NK in inputs_of(whole, linears(path)).items():
        moments, inputs_NK = found[name], inputs_NK.double()
        assert moments.rows == len(inputs_NK) == sum(map(len, ROWS))
        expected_KK = inputs_NK.T @ inputs_NK / len(inputs_NK)
        assert moments.hessian_KK is not None
        torch.testing.assert_close(moments.hessian_KK.double(), expected_KK, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(moments.importance_K.double(), expected_KK.diagonal(), atol=1e-5, rtol=1e-5)
        assert moments.input_amax == pytest.approx(float(inputs_NK.abs().max()), rel=1e-5)


def test_without_the_hessian_its_diagonal_is_kept(tmp_path: Path) -> None:
    _, path = build("llama", tmp_path)
    whole, diagonal = (moments_of(path, linears(path), hessian=hessian) for hessian in (True, False))
    for name, moments in diagonal.items():
        assert moments.hessian_KK is None
        torch.testing.assert_close(moments.importance_K, whole[name].importance_K)


def test_modules_that_read_one_tensor_share_their_moments(tmp_path: Path) -> None:
    _, path = build("qwen3_moe", tmp_path)
    found = moments_of(path, linears(path))
    layer = "model.layers.1."
    shared = [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["mlp.experts.2.gate_proj", "mlp.experts.2.up_proj"],
    ]
    apart = ["self_attn.o_proj", "mlp.experts.2.down_proj", "mlp.experts.1.down_proj", "mlp.experts.1.gate_proj"]
    for names in shared:
        assert len({id(found[layer + name]) for name in names}) == 1
    assert len({id(found[layer + name]) for name in [names[0] for names in shared] + apart}) == 2 + len(apart)


def test_only_targets_are_counted(tmp_path: Path) -> None:
    _, path = build("qwen3_moe", tmp_path)
    targets = ["model.layers.1.self_attn.v_proj", "model.layers.2.mlp.experts.3.down_proj", "lm_head"]
    assert sorted(moments_of(path, targets)) == sorted(targets)


def test_the_head_reads_what_the_last_norm_gives(tmp_path: Path) -> None:
    whole, path = build("llama", tmp_path)
    found = moments_of(path, ["lm_head"], hessian=True)["lm_head"]
    inputs_NK = inputs_of(whole, ["lm_head"])["lm_head"]
    assert found.hessian_KK is not None
    torch.testing.assert_close(found.hessian_KK, inputs_NK.T @ inputs_NK / len(inputs_NK))


def test_rows_of_one_length_run_together_and_none_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mopdctl.quant.sequential.BATCH_TOKENS", 6)
    rows = [[1, 2], [3], [4, 5], [6, 7], [8], [9, 10], [11] * 9]
    found = [ids.tolist() for ids in batches(rows, CPU)]
    assert found == [[[11] * 9], [[1, 2], [4, 5], [6, 7]], [[9, 10]], [[3], [8]]]


# -------------------------------------------------------------------------------------------------------------- experts


@torch.no_grad()
def routed(block: Any, hidden_NH: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What each expert of a block reads, and its inner states, by the definition of top-k routing."""
    chosen = (hidden_NH @ block.gate.weight.T).topk(block.gate.top_k, -1).indices
    found = []
    for expert in range(block.experts.num_experts):
        inputs_NK = hidden_NH[(chosen == expert).any(-1)]
        gate, up = (inputs_NK @ block.experts.gate_up_proj[expert].T).chunk(2, -1)
        found.append((inputs_NK, torch.nn.functional.silu(gate) * up))
    return found


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_each_expert_has_the_moments_of_the_rows_routed_to_it(kind: str, tmp_path: Path) -> None:
    whole, path = build(kind, tmp_path)
    found = moments_of(path, linears(path), hessian=True)
    experts = ".block_sparse_moe.experts" if kind == "mixtral" else ".mlp.experts"
    up, down = ("w3", "w2") if kind == "mixtral" else ("up_proj", "down_proj")
    read = inputs_of(whole, [f"model.layers.{number}.mlp.experts" for number in range(3)])
    for number, hidden_NH in enumerate(read.values()):
        for expert, pair in enumerate(routed(whole.model.layers[number].mlp, hidden_NH)):
            for last, inputs_NK in zip((up, down), pair, strict=True):
                moments = found[f"model.layers.{number}{experts}.{expert}.{last}"]
                assert moments.rows == len(inputs_NK) > 0
                assert moments.hessian_KK is not None
                expected_KK = inputs_NK.T @ inputs_NK / len(inputs_NK)
                torch.testing.assert_close(moments.hessian_KK, expected_KK, atol=1e-5, rtol=1e-4)


def test_an_expert_without_tokens_gets_the_largest_input_of_its_siblings(tmp_path: Path) -> None:
    # compressed-tensors #595, vllm #45212, Model-Optimizer #2438: scales of 1 / 0, or none at all, for such experts
    _, path = build("qwen3_moe", tmp_path)
    targets = linears(path)
    found = moments_of(path, targets, rows=[[5]])  # one token reaches two experts of four
    unreached = [name for name in targets if not found[name].rows]
    assert len(unreached) == 3 * 2 * 3
    assert set(found) == set(targets)
    for name in unreached:
        parent, _, last = name.rsplit(".", 2)
        siblings = [f"{parent}.{other}.{last}" for other in range(4)]
        assert found[name].importance_K is None
        assert found[name].hessian_KK is None
        assert found[name].input_amax == max(found[s].input_amax for s in siblings if s not in unreached) > 0
    assert all(0 < nvfp4.divisor(moments.input_amax, "max") < float("inf") for moments in found.values())


def test_inputs_that_are_all_zero_still_give_a_scale(tmp_path: Path) -> None:
    # compressed-tensors #595: 2688 / 0
    def mute(model: Any) -> None:
        model.model.layers[1].self_attn.v_proj.weight.zero_()

    _, path = build("llama", tmp_path, change=mute)
    found = moments_of(path, linears(path))["model.layers.1.self_attn.o_proj"]
    assert found.input_amax == 0.0
    assert not found.importance_K.any()
    assert nvfp4.divisor(found.input_amax, "max") == 1.0


def test_inputs_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    def spoil(model: Any) -> None:
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("inf")

    _, path = build("llama", tmp_path, change=spoil)
    with pytest.raises(InputError, match=r"model\.layers\.1\.self_attn\.o_proj: its inputs hold NaN or infinity"):
        moments_of(path, linears(path))


def test_experts_that_run_in_another_way_are_refused_by_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 3)
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="GptOssExperts does not run its experts as others do"):
        moments_of(str(tmp_path), ["model.layers.0.mlp.experts.gate_up_proj"])


# ------------------------------------------------------------------------------------------------------------ replacing


def halved(moments: Mapping[str, Moments], path: str) -> dict[str, Tensor]:
    return {f"{name}.weight": open_tensors(path).tensor(f"{name}.weight") / 2 for name in moments}


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_later_layers_read_what_replaced_weights_give(kind: str, tmp_path: Path) -> None:
    _, path = build(kind, tmp_path / "whole")
    found: dict[str, Moments] = {}

    def visit(moments: Mapping[str, Moments]) -> dict[str, Tensor]:
        found.update(moments)
        return halved(moments, path)

    calibrate(LayerwiseModel(open_tensors(path), CPU), ROWS, linears(path), visit, replacing=True)
    # The same weights on disk: each layer's inputs are those of a model whose layers before it are halved.
    for number in range(3):
        tensors = load_file(tmp_path / "whole" / "model.safetensors")
        for name in linears(path):
            if int(name.split(".")[2]) < number:
                tensors[f"{name}.weight"] = tensors[f"{name}.weight"] / 2
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
        names = [name for name in linears(path) if int(name.split(".")[2]) == number]
        for name, moments in moments_of(str(folder), names).items():
            assert moments.rows == found[name].rows
            if moments.rows:
                torch.testing.assert_close(moments.importance_K, found[name].importance_K, atol=1e-5, rtol=1e-4)


def test_without_replacing_the_weights_that_are_given_change_nothing(tmp_path: Path) -> None:
    _, path = build("llama", tmp_path)
    found: dict[str, Moments] = {}

    def visit(moments: Mapping[str, Moments]) -> dict[str, Tensor]:
        found.update(moments)
        return halved(moments, path)

    calibrate(LayerwiseModel(open_tensors(path), CPU), ROWS, linears(path), visit)
    for name, moments in moments_of(path, linears(path)).items():
        assert torch.equal(moments.importance_K, found[name].importance_K)
