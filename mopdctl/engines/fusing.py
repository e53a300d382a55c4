"""What layers are to an engine that runs them in low precision: fused with which others, left alone, or routers."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

FUSED: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
)
"""Last names of layers of one parent that read one input and that engines run as one matrix product."""

ALONE = frozenset(
    [
        "o_proj",
        "out_proj",
        "down_proj",
        "w2",
        "dense",
        "c_proj",
        "fc_out",
        "dense_4h_to_h",
        "wo",
        "qkv_proj",
        "query_key_value",
        "c_attn",
        "Wqkv",
        "gate_up_proj",
        "fc1",
        "fc2",
        "fc_in",
        "c_fc",
        "dense_h_to_4h",
        "q_b_proj",
        "kv_b_proj",
        "in_proj",
        "in_proj_qkvz",
        "fc1_latent_proj",
        "fc2_latent_proj",
    ]
)
"""Last names of layers that no engine fuses with another: what reads an inner state, and what is fused on disk."""

SENSITIVE = re.compile(
    r"(.*\.)?(in_proj_(a|b|ba)|x_proj|dt_proj)$"  # small projections of state-space and linear-attention layers
    r"|(.*\.)?(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|mm_projector|embed_vision)\."
    r"|(.*\.)?router\w*(\.|$)"  # and what routers are made of; those by other names: see `routes`
)
"""Linear layers that stay as they are by their names, as in the defaults of ModelOpt."""

Columns = Mapping[str, int]
"""Module to the width of what it reads."""


def fused_groups(columns: Columns, declared: Iterable[Sequence[str]] = ()) -> dict[str, tuple[str, ...]]:
    """Each module to all those that are fused with it, itself included, in their order.

    Args:
        columns: the linear layers, by their names in the checkpoint; each expert is a parent of its own.
        declared: further families of last names; one that shares a name with another is one with it.
    """
    families = list(FUSED)
    for family in declared:
        apart = [known for known in families if not set(known) & set(family)]
        joined = [last for known in families if known not in apart for last in known]
        families = [*apart, tuple(dict.fromkeys([*joined, *family]))]
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in columns:
        parent, _, last = name.rpartition(".")
        own = next((family for family in families if last in family), (last,))
        groups.setdefault((parent, own), []).append(name)
    return {name: tuple(group) for group in groups.values() for name in group}


def routes(parent: Any, linear: nn.Linear) -> bool:
    """Whether a layer of `parent` chooses among experts beside it: it has one output for each, or one for all."""
    experts = getattr(parent, "experts", None)
    if experts is None:
        return False
    stacks = [parameter.shape[0] for parameter in experts.parameters(recurse=False) if parameter.ndim == 3]
    return linear.out_features in {1, *stacks, *([len(experts)] if isinstance(experts, nn.ModuleList) else [])}


def unknown_siblings(columns: Columns, declared: Iterable[Sequence[str]] = ()) -> tuple[str, ...]:
    """Layers that look like a fused set of a kind that is not known: the first such set, by their names.

    These are siblings of one width of which at least one has an unknown name: whether an engine fuses them cannot be
    told from here, and if it does, scales of their own would be wrong for all but one.
    """
    fused = {last for family in (*FUSED, *declared) for last in family}
    siblings: dict[tuple[str, int], list[str]] = {}
    for name, width in columns.items():
        parent, _, last = name.rpartition(".")
        if last not in ALONE:
            siblings.setdefault((parent, width), []).append(name)
    for names in siblings.values():
        if len(names) > 1 and not fused.issuperset(name.rpartition(".")[2] for name in names):
            return tuple(names)
    return ()
