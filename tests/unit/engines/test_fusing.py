"""Layers that engines fuse: found by name among siblings, one scale for all; siblings of unknown kind are found."""

import pytest

from mopdctl.engines.fusing import SENSITIVE, fused_groups, unknown_siblings

ATTENTION = {"a.q_proj": 64, "a.k_proj": 64, "a.v_proj": 64, "a.o_proj": 64}


def test_known_families_are_groups_and_what_reads_an_inner_state_stands_alone() -> None:
    groups = fused_groups(ATTENTION | {"m.gate_proj": 64, "m.up_proj": 64, "m.down_proj": 96})
    assert groups["a.k_proj"] == ("a.q_proj", "a.k_proj", "a.v_proj")
    assert groups["a.o_proj"] == ("a.o_proj",)
    assert groups["m.up_proj"] == groups["m.gate_proj"] == ("m.gate_proj", "m.up_proj")
    assert groups["m.down_proj"] == ("m.down_proj",)


def test_parents_are_not_mixed() -> None:
    # vllm #55073: gate and up share one scale for each expert
    names = [f"m.experts.{e}.{w}" for e in range(2) for w in ("w1", "w2", "w3")]
    groups = fused_groups(dict.fromkeys(names, 64))
    assert groups["m.experts.0.w1"] == ("m.experts.0.w1", "m.experts.0.w3")
    assert groups["m.experts.1.w3"] == ("m.experts.1.w1", "m.experts.1.w3")
    assert groups["m.experts.1.w2"] == ("m.experts.1.w2",)


def test_compressed_queries_and_keys_are_a_group() -> None:
    groups = fused_groups({"a.q_a_proj": 64, "a.kv_a_proj_with_mqa": 64, "a.q_b_proj": 16, "a.kv_b_proj": 16})
    assert groups["a.q_a_proj"] == ("a.q_a_proj", "a.kv_a_proj_with_mqa")
    assert groups["a.q_b_proj"] == ("a.q_b_proj",)


def test_unknown_siblings_are_found_until_they_are_declared() -> None:
    # auto-round #2380, #2379: to_q, to_k and to_v were in no list and got scales of their own
    columns = {f"block.{name}": 64 for name in ("to_q", "to_k", "to_v", "to_out")}
    assert unknown_siblings(columns) == tuple(columns)
    declared = [["to_q", "to_k", "to_v", "to_out"]]
    assert unknown_siblings(columns, declared) == ()
    assert len(fused_groups(columns, declared)["block.to_v"]) == 4


def test_an_unknown_sibling_of_a_known_family_is_found() -> None:
    assert "a.g_proj" in unknown_siblings(ATTENTION | {"a.g_proj": 64})


@pytest.mark.parametrize(
    "columns",
    [
        ATTENTION,
        {"m.strange": 64, "m.down_proj": 64},
        {"m.strange": 64, "m.other": 32},
        {"m.strange": 64, "n.strange": 64},
        {"a.query_key_value": 64, "a.dense": 64, "m.fc1": 64, "m.fc2": 64},
    ],
)
def test_what_cannot_be_a_fused_set_is_let_through(columns: dict[str, int]) -> None:
    assert unknown_siblings(columns) == ()


def test_a_declared_family_that_shares_a_name_with_a_known_one_is_one_with_it() -> None:
    columns = ATTENTION | {"a.g_proj": 64}
    names = ("a.q_proj", "a.k_proj", "a.v_proj", "a.g_proj")
    assert fused_groups(columns, [["g_proj", "k_proj"]])["a.q_proj"] == names
    assert fused_groups(columns, [["g_proj", "k_proj", "q_proj", "v_proj"]])["a.g_proj"] == names
    assert fused_groups(columns, [["g_proj", "h_proj"], ["h_proj", "v_proj"]])["a.q_proj"] == names


@pytest.mark.parametrize(
    "name", ["m.router.gate", "m.experts.router.layer", "m.router.classifier", "m.gate.router_mlp.0", "m.router"]
)
def test_what_a_router_is_made_of_is_sensitive(name: str) -> None:
    # afmoe, jetmoe, longcat_flash, zaya: vLLM keeps them as plain layers
    assert SENSITIVE.match(name)
    assert not SENSITIVE.match("m.shared_expert.gate_proj")
