"""Adapters over shared base weights, against models whose weights were added up by hand."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mopdctl.engines.adapters import AdaptedModel, SharedBase, Source, find_source
from mopdctl.engines.base import SampleRequest
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.runs import Workspace

Make = Callable[..., Any]
Write = Callable[..., Path]

FLOAT32 = 5e-5  # x W + (x A) B against x (W + A B), through two layers
PAIRS = [((3, 4 + i), tuple(range(10 + i, 16 + 2 * i))) for i in range(4)]


@pytest.fixture(scope="module")
def base_folder(make_llama: Make, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "base"
    make_llama().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def write_adapter(base_folder: Path) -> Write:
    """Writes a peft folder by hand: its configuration, and random A and B for the modules named."""

    def write(
        folder: Path, *, seed: int, modules: Sequence[str] = ("q_proj", "v_proj"), rank: int = 4, **config: Any
    ) -> Path:
        folder.mkdir(parents=True)
        document = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(base_folder),
            "r": rank,
            "lora_alpha": 8,
            "lora_dropout": 0.3,
            "target_modules": list(modules),
        }
        (folder / "adapter_config.json").write_text(json.dumps(document | config), "utf-8")
        random = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, weight in load_file(base_folder / "model.safetensors").items():
            if name.split(".")[-2] in modules:
                stem = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{stem}.lora_A.weight"] = 0.3 * torch.randn(rank, weight.shape[1], generator=random)
                tensors[f"{stem}.lora_B.weight"] = 0.3 * torch.randn(weight.shape[0], rank, generator=random)
        save_file(tensors, folder / "adapter_model.safetensors")
        return folder

    return write


def merged_by_hand(base: Path, adapter: Path, *, scale: float | None = None) -> HFModel:
    """A full model whose weights are W + alpha / r * B A, added in float64."""
    model = HFModel.load(str(base))
    config = json.loads((adapter / "adapter_config.json").read_text("utf-8"))
    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, weight in model.model.named_parameters():
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{stem}.lora_A.weight" in tensors:
                a, b = (tensors[f"{stem}.lora_{x}.weight"].double() for x in "AB")
                weight.add_(((scale or config["lora_alpha"] / config["r"]) * b @ a).float())
            if f"{stem}.weight" in tensors:
                weight.copy_(tensors[f"{stem}.weight"])
    return model


def weights_of(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module")
def adapters(write_adapter: Write, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters that differ in rank and in the layers that they touch."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        "one": write_adapter(root / "one", seed=1),
        "two": write_adapter(root / "two", seed=2, rank=2, modules=("v_proj", "down_proj")),
    }


# --------------------------------------------------------------------------------------------------- scoring, sampling


def test_each_adapter_scores_as_its_merged_weights_and_the_base_as_if_there_were_none(
    base_folder: Path, adapters: dict[str, Path]
) -> None:
    # TRL #6530: adapters ignored
    untouched = HFModel.load(str(base_folder)).score(PAIRS)
    shared = SharedBase(HFModel.load(str(base_folder)))
    plain = shared.without_adapter()
    views = {name: shared.load(folder) for name, folder in adapters.items()}
    expected = {name: merged_by_hand(base_folder, folder).score(PAIRS) for name, folder in adapters.items()}
    for name in ("one", "two", "one", "one", "two"):  # in any order, any number of times
        for row, by_hand in zip(views[name].score(PAIRS), expected[name], strict=True):
            assert row == pytest.approx(by_hand, abs=FLOAT32)
        assert plain.score(PAIRS) == untouched
    rows = [[x for row in found for x in row] for found in (expected["one"], expected["two"], untouched)]
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        assert max(abs(a - b) for a, b in zip(rows[one], rows[other], strict=True)) > 0.1


def test_an_adapter_samples_what_its_merged_weights_sample(base_folder: Path, adapters: dict[str, Path]) -> None:
    shared = SharedBase(HFModel.load(str(base_folder)))
    one, two = shared.load(adapters["one"]), shared.load(adapters["two"])
    requests = [SampleRequest(str(i), (3, 4 + i), 12, 77 + i) for i in range(6)]
    expected = {
        name: merged_by_hand(base_folder, adapters[name]).sample(requests, temperature=1.0) for name in adapters
    }
    # Two engines take turns, token by token: what one generator switches on is off while the other runs.
    streams = {name: view.stream(requests, temperature=1.0) for name, view in (("one", one), ("two", two))}
    tokens: dict[str, dict[int, list[int]]] = {name: {i: [] for i in range(6)} for name in streams}
    while streams:
        for name in list(streams):
            step = next(streams[name], None)
            if step is None:
                del streams[name]
                continue
            for i, token in zip(step.requests.tolist(), step.token_ids.tolist(), strict=True):
                tokens[name][i].append(token)
    for name, completions in expected.items():
        assert [tuple(tokens[name][i]) for i in range(6)] == [c.token_ids for c in completions]


def test_hidden_states_and_head_give_the_adapters_logits(base_folder: Path, adapters: dict[str, Path]) -> None:
    shared = SharedBase(HFModel.load(str(base_folder)))
    view = shared.load(adapters["one"])
    shared.load(adapters["two"])
    masks = [[1] * len(response) for _, response in PAIRS]
    for hidden_NH, (_, response), row in zip(view.hidden_states(PAIRS, masks), PAIRS, view.score(PAIRS), strict=True):
        logprobs_NV = torch.log_softmax((hidden_NH @ view.head.weight_VH.T)[:, : view.vocab_size], -1)
        assert logprobs_NV[range(len(response)), response].tolist() == pytest.approx(row, abs=FLOAT32)


def test_nothing_runs_on_shared_weights_without_saying_for_which_adapter(
    base_folder: Path, adapters: dict[str, Path]
) -> None:
    shared = SharedBase(HFModel.load(str(base_folder)))
    view = shared.load(adapters["one"])
    ids = torch.tensor([[3, 4, 5]])
    for part in (view.model, view.model.base_model):
        with pytest.raises(RuntimeError, match="several adapters share it"):
            part(input_ids=ids)
    with view.computing():
        view.model(input_ids=ids)


def test_the_same_folder_is_the_same_adapter(base_folder: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    shared = SharedBase(HFModel.load(str(base_folder)))
    (tmp_path / "link").symlink_to(adapters["one"])
    assert shared.load(adapters["one"]) is shared.load(tmp_path / "link")
    assert shared.load(adapters["one"]) is not shared.load(adapters["two"])


def test_loading_and_scoring_leave_the_base_as_it_was_and_nothing_trainable(
    base_folder: Path, adapters: dict[str, Path]
) -> None:
    base = HFModel.load(str(base_folder))
    before = weights_of(base.model)
    shared = SharedBase(base)
    for folder in adapters.values():
        shared.load(folder).score(PAIRS)
    after = {n.replace(".base_layer.", "."): t for n, t in base.model.state_dict().items() if ".lora_" not in n}
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not any(p.requires_grad for p in base.model.parameters())
    assert not base.model.training


def test_a_base_in_half_precision_keeps_its_adapter_in_float32(base_folder: Path, adapters: dict[str, Path]) -> None:
    shared = SharedBase(HFModel.load(str(base_folder), dtype="bfloat16"))
    view = shared.load(adapters["one"])
    dtypes = {(".lora_" in name): p.dtype for name, p in view.model.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    whole = merged_by_hand(base_folder, adapters["one"]).score(PAIRS)
    half = HFModel.load(str(base_folder), dtype="bfloat16").score(PAIRS)
    found = view.score(PAIRS)
    error, change = (
        sum(abs(a - b) for x, y in zip(found, other, strict=True) for a, b in zip(x, y, strict=True))
        for other in (whole, half)
    )
    assert error < 0.2 * change


@pytest.mark.parametrize(
    ("config", "scale"), [({"use_rslora": True}, 4.0), ({"rank_pattern": {}, "alpha_pattern": {"q_proj": 8}}, 2.0)]
)
def test_scales_are_those_of_the_configuration(
    base_folder: Path, write_adapter: Write, tmp_path: Path, config: dict[str, Any], scale: float
) -> None:
    folder = write_adapter(tmp_path / "a", seed=3, **config)  # alpha 8, rank 4: 8 / sqrt(4) with rslora, else 8 / 4
    found = SharedBase(HFModel.load(str(base_folder))).load(folder).score(PAIRS)
    for row, by_hand in zip(found, merged_by_hand(base_folder, folder, scale=scale).score(PAIRS), strict=True):
        assert row == pytest.approx(by_hand, abs=FLOAT32)


def test_layers_that_an_adapter_brings_whole_are_its_own(
    base_folder: Path, write_adapter: Write, adapters: dict[str, Path], tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a", seed=4, modules_to_save=["lm_head"])
    tensors = load_file(folder / "adapter_model.safetensors")
    weights = load_file(base_folder / "model.safetensors")
    noise = torch.randn(weights["lm_head.weight"].shape, generator=torch.Generator().manual_seed(0))
    tensors["base_model.model.lm_head.weight"] = weights["lm_head.weight"] + 0.3 * noise
    save_file(tensors, folder / "adapter_model.safetensors")
    untouched = HFModel.load(str(base_folder)).score(PAIRS)
    shared = SharedBase(HFModel.load(str(base_folder)))
    plain, whole, low_rank = shared.without_adapter(), shared.load(folder), shared.load(adapters["one"])
    expected = [merged_by_hand(base_folder, f).score(PAIRS) for f in (folder, adapters["one"])]
    for _ in range(2):
        for view, by_hand in zip((whole, low_rank), expected, strict=True):
            for row, known in zip(view.score(PAIRS), by_hand, strict=True):
                assert row == pytest.approx(known, abs=FLOAT32)
        assert plain.score(PAIRS) == untouched
    with pytest.raises(InputError, match="its head is a"):
        _ = whole.head


def test_peft_reads_the_same_folder_to_the_same_scores(
    base_folder: Path, write_adapter: Write, make_llama: Make, tokenizer: Any, tmp_path: Path
) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    model = get_peft_model(make_llama(), LoraConfig(r=3, target_modules=["q_proj", "up_proj"], use_dora=True))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.2 * torch.rand_like(parameter))
    model.save_pretrained(tmp_path / "dora")
    theirs = PeftModel.from_pretrained(make_llama(), str(tmp_path / "dora"))
    ours = SharedBase(HFModel.load(str(base_folder))).load(tmp_path / "dora")
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    with torch.no_grad(), ours.computing():
        ours_BTV, theirs_BTV, base_BTV = (m(input_ids=ids).logits for m in (ours.model, theirs, make_llama()))
    torch.testing.assert_close(ours_BTV, theirs_BTV, atol=FLOAT32, rtol=0)
    assert float((ours_BTV - base_BTV).abs().max()) > 0.1


def test_an_adapters_own_tokenizer_comes_before_its_bases(
    base_folder: Path, write_adapter: Write, make_tokenizer: Make, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a", seed=1)
    make_tokenizer(chat_template="{{ messages }}").save_pretrained(folder)
    shared = SharedBase(HFModel.load(str(base_folder)))
    assert shared.load(folder).tokenizer.chat_template == "{{ messages }}"
    assert shared.without_adapter().tokenizer.chat_template is None


# ---------------------------------------------------------------------------------------------------- what is refused


def rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "is of type IA3; only LORA can be loaded"),
        ({"bias": "all"}, "trains biases of its base"),
        ({"layer_replication": [[0, 2], [0, 2]]}, "uses layer_replication, which is not supported"),
        ({"trainable_token_indices": [3]}, "uses trainable_token_indices"),
        ({"target_parameters": ["x"]}, "uses target_parameters"),
        ({"a_setting_of_tomorrow": {"k": 1}}, "uses a_setting_of_tomorrow"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4 changes the base weights"),
        ({"r": 5}, "does not fit its base"),
        ({"target_modules": ["q_proj"]}, "has no place in it"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "the file lacks model.layers.0.self_attn.o_proj.lora_A"),
        ({"target_modules": ["nothing"]}, "nothing"),
        ({"modules_to_save": ["lm_head"]}, "lm_head"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_adapter_that_cannot_be_followed_is_refused_in_one_line(
    base_folder: Path, write_adapter: Write, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = write_adapter(tmp_path / "a", seed=1)
    rewrite(folder, **changes)
    with pytest.raises(InputError) as caught:
        SharedBase(HFModel.load(str(base_folder))).load(folder)
    assert str(caught.value).startswith(f"adapter {folder}: ")
    assert message in str(caught.value)
    assert str(caught.value).count("adapter ") == 1
    assert "\n" not in str(caught.value)


def test_settings_that_peft_writes_by_default_are_no_hindrance(
    base_folder: Path, tmp_path: Path, make_llama: Make
) -> None:
    from peft import LoraConfig, get_peft_model

    get_peft_model(make_llama(), LoraConfig(r=2)).save_pretrained(tmp_path / "a")
    document = json.loads((tmp_path / "a" / "adapter_config.json").read_text("utf-8"))
    assert len(document) > 20
    rewrite(tmp_path / "a", qalora_group_size=16, a_setting_of_tomorrow=None)
    SharedBase(HFModel.load(str(base_folder))).load(tmp_path / "a")


def test_a_pickle_is_not_read(base_folder: Path, write_adapter: Write, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", seed=1)
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(InputError, match=r"has no adapter_model\.safetensors"):
        SharedBase(HFModel.load(str(base_folder))).load(folder)


def test_an_adapter_that_was_cut_short_is_refused(base_folder: Path, write_adapter: Write, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", seed=1)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match="does not fit its base"):
        SharedBase(HFModel.load(str(base_folder))).load(folder)


# ------------------------------------------------------------------------------------------------------ where it lies


def test_full_weights_are_their_own_source(base_folder: Path, tmp_path: Path) -> None:
    assert find_source(str(base_folder), Workspace(tmp_path / "w"), relative_to=tmp_path) == Source(str(base_folder))
    assert find_source("org/model", Workspace(tmp_path / "w"), relative_to=tmp_path) == Source("org/model")


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("in-workspace", "w/checkpoints/in-workspace"),
        ("beside", "adapters/math/beside"),
        ("../sibling", "adapters/math/../sibling"),
        ("./of-the-file", "./of-the-file"),
        ("org/model", "org/model"),
    ],
)
def test_the_base_that_an_adapter_names_is_found(write_adapter: Write, tmp_path: Path, named: str, found: str) -> None:
    for folder in ("w/checkpoints/in-workspace", "adapters/sibling", "of-the-file"):
        (tmp_path / folder).mkdir(parents=True)
    folder = write_adapter(tmp_path / "adapters" / "math", seed=1, base_model_name_or_path=named)
    (folder / "beside").mkdir()
    source = find_source("adapters/math", Workspace(tmp_path / "w"), relative_to=tmp_path)
    assert source.adapter == folder
    assert source.model == (found if "org" in found else str(tmp_path / found))


def test_a_base_that_is_given_comes_before_the_one_named(
    base_folder: Path, write_adapter: Write, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a", seed=1, base_model_name_or_path="./nowhere")
    workspace = Workspace(tmp_path / "w")
    given = find_source("a", workspace, relative_to=tmp_path, base=str(base_folder))
    assert given == Source(str(base_folder), folder)
    with pytest.raises(InputError, match=r"adapter .*: no base, .*nowhere.*; give it as `base`"):
        find_source("a", workspace, relative_to=tmp_path)


@pytest.mark.parametrize("named", [None, "", 7])
def test_an_adapter_without_a_base_is_refused(write_adapter: Write, tmp_path: Path, named: Any) -> None:
    write_adapter(tmp_path / "a", seed=1, base_model_name_or_path=named)
    with pytest.raises(InputError, match="names no base model; give it as `base`"):
        find_source("a", Workspace(tmp_path / "w"), relative_to=tmp_path)


def test_an_adapter_over_an_adapter_is_refused(write_adapter: Write, tmp_path: Path) -> None:
    write_adapter(tmp_path / "one", seed=1)
    write_adapter(tmp_path / "two", seed=2, base_model_name_or_path="../one")
    with pytest.raises(InputError, match="is an adapter too"):
        find_source("two", Workspace(tmp_path / "w"), relative_to=tmp_path)


def test_a_base_for_full_weights_is_refused(base_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"`base` is given, but it is no adapter"):
        find_source(str(base_folder), Workspace(tmp_path / "w"), relative_to=tmp_path, base="x")


def test_an_identity_follows_adapter_and_base(base_folder: Path, write_adapter: Write, tmp_path: Path) -> None:
    base = shutil.copytree(base_folder, tmp_path / "base")
    folder = write_adapter(tmp_path / "a", seed=1, base_model_name_or_path="../base")

    def identity() -> Any:
        return find_source("a", Workspace(tmp_path / "w"), relative_to=tmp_path).identity

    first = identity()
    assert identity() == first
    (base / "config.json").write_text((base / "config.json").read_text("utf-8") + " ", "utf-8")
    second = identity()
    assert second["adapter"] == first["adapter"]
    assert second["base"] != first["base"]
    rewrite(folder, lora_alpha=9)
    assert identity()["adapter"] != first["adapter"]


# ------------------------------------------------------------------------------------------------------ written again


def test_a_merge_is_written_as_a_plain_checkpoint_and_leaves_the_model_alone(
    base_folder: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    shared = SharedBase(HFModel.load(str(base_folder)))
    view: AdaptedModel = shared.load(adapters["one"])
    shared.load(adapters["two"])
    before, weights = view.score(PAIRS), weights_of(view.model)
    view.save(tmp_path / "saved")
    assert view.score(PAIRS) == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in view.model.state_dict().items())
    plain = HFModel.load(str(tmp_path / "saved"))
    assert type(plain) is HFModel
    expected = weights_of(merged_by_hand(base_folder, adapters["one"]).model)
    found = weights_of(plain.model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=0)
    again = SharedBase(HFModel.load(str(base_folder))).load(tmp_path / "saved" / "adapter")
    assert again.score(PAIRS) == before


def test_what_is_no_plain_sum_is_not_merged(base_folder: Path, write_adapter: Write, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", seed=1, modules=("q_proj", "lm_head"))
    with pytest.raises(InputError, match="only a plain LoRA of inner linear layers can be merged"):
        SharedBase(HFModel.load(str(base_folder))).load(folder).save(tmp_path / "saved")
    with pytest.raises(InputError, match="no adapter to write"):
        SharedBase(HFModel.load(str(base_folder))).without_adapter().save(tmp_path / "saved")
