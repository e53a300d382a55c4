"""Patterns: names, globs, regular expressions; and one that matches nothing is an error."""

import pytest

from mopdctl.errors import InputError
from mopdctl.quant.targets import experts_of, matching

NAMES = ["lm_head", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("lm_head", {0}),
        ("*.mlp.*", {1, 2, 3}),
        ("model.layers.[0].mlp.up_proj", {1}),
        (r"re:.*\.0\..*up", {1}),
        (r"re:model\.layers\.\d", {1, 2, 3}),  # from the beginning, not to the end, as compressed-tensors matches
    ],
)
def test_a_pattern_is_a_name_a_glob_or_a_regular_expression(pattern: str, found: set[int]) -> None:
    assert matching(pattern, NAMES) == {NAMES[number] for number in found}


def test_a_name_with_dots_is_no_regular_expression() -> None:
    with pytest.raises(InputError):
        matching("model.layers.0.mlp.up.proj", [NAMES[1]])


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("*mixer.up_proj", "model.layers.0.mlp.up_proj"),
        ("lm_heads", "lm_head"),
        ("re:.*gate_proj", "up_proj"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_names(pattern: str, nearest: str) -> None:
    # Model-Optimizer 0.46: `*mlp*` missed modules called mixer, and a checkpoint came out that was not quantized
    with pytest.raises(InputError, match="matches no module; nearest: ") as caught:
        matching(pattern, NAMES)
    assert nearest in str(caught.value)


def test_a_broken_regular_expression_is_an_error() -> None:
    with pytest.raises(InputError, match=r"'re:\(': no regular expression"):
        matching("re:(", NAMES)


def test_experts_are_known_by_their_place() -> None:
    assert experts_of("model.layers.3.mlp.experts.17.gate_proj") == "model.layers.3.mlp.experts"
    assert experts_of("backbone.layers.3.mixer.experts.0.up_proj") == "backbone.layers.3.mixer.experts"
    assert experts_of("model.layers.3.mlp.shared_experts.up_proj") is None
    assert experts_of("model.layers.3.mlp.gate") is None
