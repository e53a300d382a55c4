"""Settings that mean nothing together are refused; recipes, files and options lie on top of each other."""

from pathlib import Path
from typing import Any

import pytest

from mopdctl.config.quant import QuantConfig, load_quant, load_recipe, shipped_recipes
from mopdctl.errors import InputError

CALIBRATION = {"data": "rows.jsonl"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "gptq"}, "method `gptq` needs `calibration`"),
        ({"bits": 5.0}, "`bits` needs `calibration`"),
        ({"act": "dynamic"}, "`act: dynamic` needs `calibration`"),
        ({"format": "mxfp4", "method": "46"}, "method `46` chooses scales of NVFP4"),
        ({"rule": "ceil"}, "nothing here is MXFP4"),
        ({"format": "mxfp4", "layout": "modelopt"}, "no engine loads MXFP4 in the modelopt layout"),
        ({"format": "fp8", "layout": "modelopt"}, "FP8 in the modelopt layout needs input scales"),
        ({"method": "max", "calibration": CALIBRATION}, "nothing uses `calibration` with method `max`"),
        ({"calibration": {}}, "needs either `data` or `store`"),
        ({"calibration": CALIBRATION | {"store": "s"}}, "needs either `data` or `store`"),
        ({"methods": "max"}, "unknown key 'methods'; did you mean 'method'"),
        ({"fused": [["alone"]]}, "fused.0"),
        ({"tp": [0]}, "tp.0"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message.replace("[", r"\[")):
        load_quant(None, {"model": "m", "name": "n"} | settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"format": "mxfp4", "act": "dynamic"},
        {"format": "fp8", "act": "dynamic"},
        {"calibration": CALIBRATION},
        {"act": "dynamic", "method": "max", "calibration": CALIBRATION},
        {"format": "mxfp4", "method": "46", "rules": [{"match": "*", "precision": "nvfp4"}]},
    ],
)
def test_settings_that_fit_are_taken(settings: dict[str, Any]) -> None:
    load_quant(None, {"model": "m", "name": "n"} | settings)


def test_options_come_before_the_file_and_the_file_before_the_recipe(tmp_path: Path) -> None:
    recipe, file = tmp_path / "recipe.yaml", tmp_path / "quant.yaml"
    recipe.write_text("format: mxfp4\nmethod: max\nkv_cache: fp8\nignore: [lm_head]\n", "utf-8")
    file.write_text("model: m\nname: n\nmethod: sweep\ncalibration: {data: a.jsonl, samples: 3}\n", "utf-8")
    found = load_quant(file, {"format": "nvfp4", "calibration": {"samples": 5}}, recipe=str(recipe), ignore=["x"])
    assert (found.format, found.method, found.kv_cache) == ("nvfp4", "sweep", "fp8")
    assert found.ignore == ["lm_head", "x"]
    assert found.calibration is not None
    assert (str(found.calibration.data), found.calibration.samples) == ("a.jsonl", 5)


def test_shipped_recipes_are_valid_and_say_where_they_come_from() -> None:
    assert "nemotron-3-ultra" in shipped_recipes()
    for name in shipped_recipes():
        recipe = load_recipe(name)
        assert recipe.description
        QuantConfig.model_validate({"model": "m", "name": "n"} | recipe.model_dump(exclude_unset=True))


def test_the_published_recipe_is_four_over_six_with_fp8_beside_it() -> None:
    recipe = load_recipe("nemotron-3-ultra")
    assert (recipe.format, recipe.method, recipe.kv_cache) == ("nvfp4", "46", "fp8")
    assert [rule.precision for rule in recipe.rules] == ["nvfp4", "fp8", "fp8", "bf16"]


def test_an_unknown_recipe_is_refused_with_those_that_ship() -> None:
    with pytest.raises(InputError, match=r"recipe 'ultra': neither a file nor one that ships: .*nemotron-3-ultra"):
        load_recipe("ultra")
