from pathlib import Path
from typing import Any

import pytest

from mopdctl.config.base import load_config, load_yaml
from mopdctl.config.overrides import load_with_overrides
from mopdctl.config.sft import SftConfig
from mopdctl.config.teachers import TeachersFile, load_teachers
from mopdctl.errors import InputError

SFT = "model: base\ndata: [rows.jsonl]\nname: out\n"
TEACHERS = """\
student: rlvr
prompts: prompts.jsonl
name: mopd2
train: {steps: 10}
teachers:
  math: {model: math-rl, domains: [math, algebra]}
"""


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(text: str | bytes) -> Path:
        path = tmp_path / "file.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


# --------------------------------------------------------------------------------------------------------------- YAML


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("1.5e+3", 1500.0),
        (".5", 0.5),
        ("-3", -3),
        ("010", 10),
        ("no", "no"),
        ("on", "on"),
        ("y", "y"),
        ("true", True),
        ("null", None),
        ("'1e-4'", "1e-4"),
        ("1.0.0", "1.0.0"),
        ("12:30", "12:30"),
    ],
)
def test_scalars_mean_what_they_look_like(written: Any, text: str, value: Any) -> None:
    found = load_yaml(written(f"key: {text}\n"))["key"]
    assert found == value
    assert type(found) is type(value)


def test_a_duplicate_key_is_named_with_the_line_of_its_second_use(written: Any) -> None:
    with pytest.raises(InputError, match=r'file\.yaml:4: duplicate key "model"'):
        load_yaml(written("# comment\nmodel: a\nname: b\nmodel: c\n"))
    with pytest.raises(InputError, match=r'file\.yaml:3: duplicate key "steps"'):
        load_yaml(written("train:\n  steps: 1\n  steps: 1\n"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: [1\nb: 2\n", r"file\.yaml:2: not YAML"),
        ("a: b: c\n", r"file\.yaml:1: not YAML"),
        ("a:\n\t- b\n", r"file\.yaml:2: not YAML"),
        ("a: *nowhere\n", r"file\.yaml:1: not YAML"),
        ("a: 1\n---\nb: 2\n", r"file\.yaml:2: not YAML"),
        ("a: !!python/object:os.system rm\n", r"file\.yaml:1: not YAML"),
        ("a: !!python/object/apply:os.system [rm]\n", r"file\.yaml:1: not YAML"),
        ("a: \x01\n", r"file\.yaml: not YAML"),
        ("a: 2026-02-31\n", r"file\.yaml"),
        ("a: !!int seven\n", r"file\.yaml"),
        ("a: !!bool maybe\n", r"file\.yaml"),
        (b"a: \xff\n", r"file\.yaml: not UTF-8"),
        ("[" * 1_000, r"file\.yaml"),
    ],
    ids=str,
)
def test_what_is_no_yaml_is_an_input_error_with_its_line(written: Any, text: str | bytes, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        load_yaml(written(text))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("model: &a {b: *a}\n", "holds itself"),
        ("data: &a [x, [*a]]\n", "holds itself"),
        ("&a\nmodel: *a\n", "holds itself"),
        ("model: &a !!omap [x: *a]\n", "holds itself"),
        ("model: &a\n  ? [x, *a]\n  : 1\n", "not YAML"),
        ("model: " + "[" * 101 + "]" * 101 + "\n", "nested deeper than 100"),
        ("a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)), "more than 100,000"),
    ],
    ids=["a mapping", "a list", "the whole", "an ordered mapping", "a key", "deep", "doubled 40 times"],
)
def test_yaml_that_holds_itself_or_grows_without_end_is_an_input_error(written: Any, text: str, complaint: str) -> None:
    path = written(text)
    with pytest.raises(InputError, match=rf"file\.yaml: .*{complaint}"):
        load_yaml(path)
    with pytest.raises(InputError, match=rf"file\.yaml: .*{complaint}"):
        load_config(SftConfig, path)


def test_a_setting_that_holds_itself_is_an_input_error(written: Any) -> None:
    with pytest.raises(InputError, match=r"with command-line overrides: holds itself"):
        load_with_overrides(SftConfig, written(SFT), {}, ["model=&a {b: *a}"])


def test_what_stands_under_two_names_is_there_twice(written: Any) -> None:
    text = "a: &a {x: [1, 2]}\nb: *a\nc: [*a, *a]\nd: {<<: *a, y: 3}\n"
    found = {"x": [1, 2]}
    assert load_yaml(written(text)) == {"a": found, "b": found, "c": [found, found], "d": found | {"y": 3}}


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n- b\n", "just text\n", "3\n", "null\n"])
def test_anything_but_a_mapping_is_an_input_error(written: Any, text: str) -> None:
    with pytest.raises(InputError, match=r"file\.yaml: (holds \w+, not a mapping|is empty; a mapping)"):
        load_yaml(written(text))


def test_a_byte_order_mark_and_windows_line_ends_do_not_matter(written: Any) -> None:
    assert load_yaml(written(b"\xef\xbb\xbfa: 1\r\nb: [x, y]\r\n")) == {"a": 1, "b": ["x", "y"]}


def test_a_missing_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.yaml: no such file"):
        load_yaml(tmp_path / "none.yaml")


# ------------------------------------------------------------------------------------------------------------- models


def test_a_scientific_number_arrives_as_a_number(written: Any) -> None:
    config = load_config(SftConfig, written(SFT + "train: {steps: 2, learning_rate: 1e-4}\n"))
    assert config.train.learning_rate == 1e-4
    assert config.data == [Path("rows.jsonl")]


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        ("train: {steps: 1, learning_rat: 1e-4}", r"unknown key 'train\.learning_rat'; did you mean 'learning_rate'\?"),
        ("train: {steps: 1}\nloss_om: all", r"unknown key 'loss_om'; did you mean 'loss_on'\?"),
        (
            "train: {steps: 1}\nzzz: 1",
            r"unknown key 'zzz'; known keys: data, loss_on, max_length, model, name, overlong, packing, stages, train",
        ),
        ("trian: {steps: 1}", r"unknown key 'trian'; did you mean 'train'\?"),
        ("", r"key 'train' is missing"),
        ("train: {}", r"key 'train\.steps' is missing"),
        ("train: 3", r"train: "),
        ("train: {steps: 0}", r"train\.steps: .*greater than 0"),
        ("train: {steps: 1.5}", r"train\.steps: "),
        ("train: {steps: 1, learning_rate: .nan}", r"train\.learning_rate: .*finite"),
        ("train: {steps: 1, learning_rate: .inf}", r"train\.learning_rate: .*finite"),
        ("train: {steps: 1, dtype: float16}", r"train\.dtype: .*bfloat16"),
        ("train: {steps: 1}\nloss_on: none", r"loss_on: "),
        ("train: {steps: 1}\n1: 2", r"1: "),
    ],
)
def test_a_wrong_key_or_value_is_named_by_its_path_in_one_line(written: Any, extra: str, complaint: str) -> None:
    with pytest.raises(InputError, match=rf"file\.yaml: {complaint}") as caught:
        load_config(SftConfig, written(SFT + extra + "\n"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("domains: [math", "domain: [math", r"unknown key 'teachers\.math\.domain'; did you mean 'domains'\?"),
        ("math: {", "math: {wieght: 2, ", r"unknown key 'teachers\.math\.wieght'; did you mean 'weight'\?"),
        ("math: {", "model: {wieght: 2, ", r"unknown key 'teachers\.model\.wieght'; did you mean 'weight'\?"),
        ("[math, algebra]", "[]", r"teachers\.math\.domains: "),
        ("[math, algebra]", "math", r"teachers\.math\.domains: "),
        ("  math: {model: math-rl, domains: [math, algebra]}", "  {}", r"teachers: "),
        ("steps: 10", "steps: 10, top_p: 0.9", r"train\.top_p: must be 1"),
        ("steps: 10", "steps: 10, temperature: 0", r"train\.temperature: "),
        ("steps: 10", "steps: 10, correction_low: 6", r"train: correction_low is above correction_high"),
        ("steps: 10", "steps: 10, eval_every: 5", r"train: eval_every needs eval_prompts"),
        ("steps: 10", "steps: 10, staleness: 2", r"train\.staleness: "),
        ("student: rlvr", "student: rlvr\nefforts: {low: {}}", r".*efforts need a second routing field"),
        ("student: rlvr", "student: rlvr\nrouting: []", r"routing.*one or two"),
        ("student: rlvr", "student: rlvr\nrouting: [a, b, c]", r"routing.*one or two"),
        (
            "student: rlvr",
            "student: rlvr\nrouting: [domain, effort]\nefforts: {low: {max_new_token: 9}}",
            r"unknown key 'efforts\.low\.max_new_token'; did you mean 'max_new_tokens'\?",
        ),
    ],
)
def test_what_is_wrong_in_teachers_yaml_is_named(written: Any, before: str, after: str, complaint: str) -> None:
    assert before in TEACHERS
    with pytest.raises(InputError, match=rf"file\.yaml: {complaint}"):
        load_teachers(written(TEACHERS.replace(before, after, 1)))


def test_a_plain_teachers_yaml_has_the_documented_defaults(written: Any) -> None:
    config = load_teachers(written(TEACHERS))
    assert config.routing_keys == ("domain",)
    assert config.teachers["math"].weight == 1.0
    assert (config.train.correction, config.train.correction_low, config.train.correction_high) == ("icepop", 0.5, 5.0)
    assert (config.train.clip_low, config.train.clip_high) == (0.2, 0.28)
    assert config.train.loss_reduction == "token"


def test_routing_is_one_field_or_two(written: Any) -> None:
    assert load_teachers(written(TEACHERS + "routing: subject\n")).routing_keys == ("subject",)
    assert load_teachers(written(TEACHERS + "routing: [domain, effort]\n")).routing_keys == ("domain", "effort")


def test_a_configuration_cannot_be_changed_after_it_was_read(written: Any) -> None:
    config = load_config(TeachersFile, written(TEACHERS))
    with pytest.raises(ValueError, match="frozen"):
        config.student = "other"  # type: ignore[misc]
