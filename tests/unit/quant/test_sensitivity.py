"""What quantizing a group costs, against the whole model's gradients and measured KL; bits spent where they pay."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from mopdctl.config.quant import Precision, QuantConfig
from mopdctl.engines.weights import open_tensors
from mopdctl.errors import InputError
from mopdctl.quant.budget import BITS, Group, allocate, decision_groups, precision_rules
from mopdctl.quant.layerwise import LayerwiseModel
from mopdctl.quant.mixed import mixed_precision
from mopdctl.quant.plan import Plan, make_plan
from mopdctl.quant.sensitivity import Costs, sensitivities

CPU = torch.device("cpu")
ROWS = [[5, 9, 31, 7, 7, 12, 3], [4, 8, 15], [16, 23, 2, 2, 39, 11, 6], [1]]
GROUPS = {
    "first": ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj"],
    "down": ["model.layers.0.mlp.down_proj"],
    "second": ["model.layers.1.self_attn.o_proj"],
}
MOE_GROUPS = {
    "o": ["model.layers.0.self_attn.o_proj"],
    "experts": [
        f"model.layers.1.mlp.experts.{expert}.{last}"
        for expert in range(4)
        for last in ("gate_proj", "up_proj", "down_proj")
    ],
}


def rounded(path: Path, *, scale: float = 1.0) -> Callable[[str, Precision], Tensor]:
    """Weights rounded to multiples of 2^-5 in `nvfp4` and of 2^-8 in `fp8`, or moved a part of the way."""
    tensors = open_tensors(str(path))

    def quantized(name: str, precision: Precision) -> Tensor:
        weight_RK = tensors.tensor(f"{name}.weight").float()
        step = {"nvfp4": 2.0**-5, "fp8": 2.0**-8}[precision]
        return weight_RK + scale * ((weight_RK / step).round() * step - weight_RK)

    return quantized


def costs_of(path: Path, groups: dict[str, list[str]], rows: list[list[int]] = ROWS, **options: Any) -> Costs:
    model = LayerwiseModel(open_tensors(str(path)), CPU)
    quantized = options.pop("quantized", None) or rounded(path)
    return sensitivities(model, rows, groups, ["nvfp4", "fp8", "bf16"], quantized, **options)


def whole_model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager").eval()


def changed_model(path: Path, folder: Path, names: list[str], quantized: Callable[[str, Precision], Tensor]) -> Any:
    """The whole model with some weights in `nvfp4`, by way of its files."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    tensors = load_file(path / "model.safetensors")
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    tensors |= {f"{name}.weight": quantized(name, "nvfp4") for name in names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((path / "config.json").read_bytes())
    return whole_model(folder)


# --------------------------------------------------------------------------------------------------------------- costs


@pytest.mark.parametrize(("kind", "groups"), [("llama", GROUPS), ("qwen3_moe", MOE_GROUPS)])
def test_costs_are_squares_of_gradient_times_change_in_the_whole_model(
    kind: str, groups: dict[str, list[str]], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = checkpoint(kind)
    found = costs_of(path, groups, seed=3)
    whole = whole_model(path)
    changed = {name: changed_model(path, tmp_path / name, groups[name], rounded(path)) for name in groups}
    expected = dict.fromkeys(groups, 0.0)
    generator = torch.Generator().manual_seed(3)
    for row in ROWS:
        whole.zero_grad()
        logprobs_NV = whole(torch.tensor([row])).logits[0].log_softmax(-1)
        labels_N1 = torch.multinomial(logprobs_NV.detach().exp(), 1, generator=generator)
        logprobs_NV.gather(-1, labels_N1).sum().backward()
        for name, other in changed.items():
            pairs = zip(whole.parameters(), other.parameters(), strict=True)
            slope = sum(float((p.grad * (q - p).detach()).sum()) for p, q in pairs if p.grad is not None)
            expected[name] += slope**2 / 2 / sum(map(len, ROWS))
    for name in groups:
        assert found[name]["nvfp4"] == pytest.approx(expected[name], rel=1e-3)
        assert 0 < found[name]["fp8"] < found[name]["nvfp4"] / 4
        assert found[name]["bf16"] == 0


def test_costs_come_near_the_measured_kl_and_add_up(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = checkpoint("llama")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 40, (80, 6), generator=generator).tolist()
    quantized = rounded(path, scale=0.5)
    found = costs_of(path, GROUPS, rows, quantized=quantized)
    ids_BT = torch.tensor(rows)
    with torch.no_grad():
        full = whole_model(path)(ids_BT).logits.log_softmax(-1)
        measured = {}
        every = {"all": [name for names in GROUPS.values() for name in names]}
        for group, names in (GROUPS | every).items():
            other = changed_model(path, tmp_path / group, names, quantized)(ids_BT).logits.log_softmax(-1)
            measured[group] = float((full.exp() * (full - other)).sum(-1).mean())
    for group in GROUPS:
        assert found[group]["nvfp4"] == pytest.approx(measured[group], rel=0.35)
    assert sum(cost["nvfp4"] for cost in found.values()) == pytest.approx(measured["all"], rel=0.35)
    order = sorted(GROUPS, key=lambda group: measured[group])
    assert sorted(GROUPS, key=lambda group: found[group]["nvfp4"]) == order


def test_rows_in_several_passes_cost_what_they_do_in_one(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint("llama")
    told: list[tuple[int, int]] = []
    expected = costs_of(path, GROUPS)
    monkeypatch.setattr("mopdctl.quant.sensitivity._STATES_BYTES", 4 * 64 * 3 * 10)  # ten tokens
    monkeypatch.setattr("mopdctl.quant.sensitivity._LOGITS_BYTES", 4 * 40 * 3)
    found = costs_of(path, GROUPS, on_layer=lambda done, total: told.append((done, total)))
    assert told == [(number, 4) for number in range(1, 5)]
    for group in GROUPS:
        assert found[group] == pytest.approx(expected[group], rel=1e-4)


def test_a_group_outside_the_layers_is_refused(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match="head: is in no decoder layer"):
        costs_of(checkpoint("llama"), {"head": ["lm_head"]})


# ----------------------------------------------------------------------------------------------------------- allocation

CANDIDATES: list[Precision] = ["nvfp4", "fp8", "bf16"]

problems = st.lists(
    st.tuples(st.integers(1, 60), st.floats(0.001, 10), st.floats(0, 1.2), st.floats(0, 0.3)), min_size=1, max_size=6
)


def costs_and_sizes(problem: list[tuple[int, float, float, float]]) -> tuple[Costs, dict[str, int]]:
    """Costs that mostly fall with bits, and now and then do not."""
    costs: Costs = {
        str(i): {"nvfp4": cost, "fp8": cost * eight, "bf16": cost * eight * sixteen}
        for i, (_, cost, eight, sixteen) in enumerate(problem)
    }
    return costs, {str(i): size for i, (size, *_) in enumerate(problem)}


@given(problem=problems, bits=st.floats(4.5, 17))
@settings(deadline=None)
def test_no_choice_within_the_budget_beats_the_allocation_by_more_than_the_stated_gap(
    problem: list[tuple[int, float, float, float]], bits: float
) -> None:
    costs, elements = costs_and_sizes(problem)
    found = allocate(costs, elements, bits)
    total = sum(elements.values())
    assert found.bits_per_element <= bits * (1 + 1e-9)
    assert found.cost_nats == pytest.approx(sum(costs[g][p] for g, p in found.precisions.items()))
    least = min(
        sum(costs[g][p] for g, p in zip(costs, choice, strict=True))
        for choice in product(CANDIDATES, repeat=len(costs))
        if sum(elements[g] * BITS[p] for g, p in zip(costs, choice, strict=True)) <= bits * total * (1 + 1e-12)
    )
    assert least >= found.cost_nats - found.gap_nats - 1e-9
    assert found.cost_nats >= least - 1e-9


@given(problem=problems, one=st.floats(4.5, 16), other=st.floats(4.5, 16))
@settings(deadline=None)
def test_more_bits_never_cost_more(problem: list[tuple[int, float, float, float]], one: float, other: float) -> None:
    costs, elements = costs_and_sizes(problem)
    fewer, more = (allocate(costs, elements, bits) for bits in sorted((one, other)))
    assert more.cost_nats <= fewer.cost_nats + 1e-9


def test_enough_bits_leave_everything_at_its_least_cost_and_no_gap() -> None:
    costs: Costs = {"a": {"nvfp4": 3.0, "fp8": 1.0, "bf16": 0.0}, "b": {"nvfp4": 1.0, "fp8": 2.0, "bf16": 1.5}}
    found = allocate(costs, {"a": 10, "b": 10}, 16.0)
    assert found.precisions == {"a": "bf16", "b": "nvfp4"}  # more bits that cost more are never taken
    assert (found.cost_nats, found.gap_nats, found.bits_per_element) == (1.0, 0.0, 10.25)


def test_the_group_that_minds_most_for_its_size_gets_the_bits() -> None:
    costs: Costs = {
        name: {"nvfp4": cost, "fp8": cost / 100, "bf16": 0.0} for name, cost in (("a", 1.0), ("b", 3.0), ("c", 0.5))
    }
    found = allocate(costs, {"a": 100, "b": 400, "c": 100}, 4.5 + 3.5 * 100 / 600)
    assert found.precisions == {"a": "fp8", "b": "nvfp4", "c": "nvfp4"}
    assert found.gap_nats == pytest.approx(0.0, abs=1e-12)


def test_a_step_that_does_not_fit_leaves_its_room_to_smaller_ones() -> None:
    costs: Costs = {"large": {"nvfp4": 9.0, "fp8": 0.0}, "small": {"nvfp4": 0.5, "fp8": 0.1}}
    found = allocate(costs, {"large": 100, "small": 90}, 4.5 + 3.5 * 95 / 190)
    assert found.precisions == {"large": "nvfp4", "small": "fp8"}
    assert found.gap_nats == pytest.approx(9.1 - (9.5 - 9.0 * 95 / 100))


def test_what_a_rule_has_decided_counts_in_the_budget_and_stays() -> None:
    costs: Costs = {"fixed": {"bf16": 0.0}, "free": {"nvfp4": 1.0, "fp8": 0.1, "bf16": 0.0}}
    found = allocate(costs, {"fixed": 100, "free": 100}, 10.25)
    assert found.precisions == {"fixed": "bf16", "free": "nvfp4"}
    with pytest.raises(InputError, match=r"at least 10\.25 are needed"):
        allocate(costs, {"fixed": 100, "free": 100}, 10.2)


# ---------------------------------------------------------------------------------------------------------------- rules


def configured(path: Path, **changes: Any) -> tuple[QuantConfig, Plan]:
    calibration = {"data": "rows.jsonl"}
    config = QuantConfig.model_validate(
        {"model": str(path), "name": "out", "bits": 6.0, "calibration": calibration} | changes
    )
    return config, make_plan(config, open_tensors(str(path)))


def test_groups_are_what_an_engine_runs_as_one(checkpoint: Callable[..., Path]) -> None:
    config, plan = configured(checkpoint("qwen3_moe"), rules=[{"match": "*.0.self_attn.o_proj", "precision": "fp8"}])
    groups = decision_groups(plan, config)
    layer = "model.layers.0."
    assert {name for name in groups if name.startswith(layer)} == {
        f"{layer}self_attn.{name}" for name in ("k_proj", "o_proj")
    } | {f"{layer}mlp.experts"}
    attention = groups[f"{layer}self_attn.k_proj"]
    assert {name.rpartition(".")[2] for name in attention.modules} == {"q_proj", "k_proj", "v_proj"}
    assert attention.elements == 64 * (64 + 32 + 32)
    assert attention.candidates == ("nvfp4", "fp8", "bf16")
    assert len(groups[f"{layer}mlp.experts"].modules) == 12
    assert groups[f"{layer}mlp.experts"].candidates == ("nvfp4", "bf16")  # no kernel of vLLM takes FP8 ones in W8A16
    assert groups[f"{layer}self_attn.o_proj"].candidates == ("fp8",)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_rules_give_back_the_allocation(kind: str, checkpoint: Callable[..., Path]) -> None:
    config, plan = configured(checkpoint(kind))
    groups = decision_groups(plan, config)
    by_precision = {"nvfp4": 1.0, "fp8": 0.1, "bf16": 0.0}
    costs: Costs = {
        name: {p: by_precision[p] * (1 + i) for p in group.candidates} for i, (name, group) in enumerate(groups.items())
    }
    found = allocate(costs, {name: group.elements for name, group in groups.items()}, 7.0)
    assert len(set(found.precisions.values())) > 1
    rules = precision_rules(found, groups, config.format)
    _, again = configured(checkpoint(kind), bits=None, method="sweep", rules=[rule.model_dump() for rule in rules])
    for name, group in groups.items():
        assert {again.modules[module].precision for module in group.modules} == {found.precisions[name]}


def test_what_a_rule_says_already_is_not_said_again() -> None:
    groups = {"a": Group(("a",), 1, ("fp8",)), "b": Group(("b",), 1, ("nvfp4", "fp8", "bf16"))}
    found = allocate({"a": {"fp8": 0.0}, "b": {"nvfp4": 1.0, "fp8": 0.0, "bf16": 0.0}}, {"a": 1, "b": 1}, 16.0)
    assert [rule.model_dump() for rule in precision_rules(found, groups, "nvfp4")] == [
        {"match": "b", "precision": "fp8"}
    ]


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_budget_is_kept_on_a_real_checkpoint_and_spent_by_cost(kind: str, checkpoint: Callable[..., Path]) -> None:
    path = checkpoint(kind)
    config, plan = configured(path)
    amax = dict.fromkeys(plan.quantized, 1.0)
    rules, told = mixed_precision(config, plan, amax, ROWS, CPU)
    assert 4.5 < told["bits_per_element"] <= 6.0
    assert told["cost_nats"] < sum(found["nvfp4"] for found in told["costs_nats"].values())
    assert 0 <= told["gap_nats"] < told["cost_nats"]
    _, again = configured(path, bits=None, rules=[rule.model_dump() for rule in rules])
    elements = {name: m.shape[0] * m.shape[1] for name, m in again.modules.items() if name in plan.quantized}
    bits = sum(elements[name] * BITS[again.modules[name].precision] for name in elements) / sum(elements.values())
    assert bits == pytest.approx(told["bits_per_element"])


def test_a_budget_below_four_bits_and_their_scales_is_told_before_the_work(checkpoint: Callable[..., Path]) -> None:
    config, plan = configured(checkpoint("llama"), bits=4.3)
    with pytest.raises(InputError, match=r"bits 4\.3: at least 4\.50 are needed"):
        mixed_precision(config, plan, {}, [], CPU)
