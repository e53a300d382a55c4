"""Command-line overrides of a configuration file."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from mopdctl.config.base import ModelT, load_yaml, parse
from mopdctl.errors import InputError


def load_with_overrides(
    model: type[ModelT], path: Path, flags: Mapping[str, Any], settings: Sequence[str] = ()
) -> ModelT:
    """Loads `path` with `flags` (dotted key to value; None means not given) and `KEY=VALUE` settings put over it.

    Raises InputError for a setting without `=` and for whatever the model refuses, naming the file.
    """
    document = load_yaml(path)
    given = {key: value for key, value in flags.items() if value is not None}
    for setting in settings:
        key, separator, text = setting.partition("=")
        if not separator or not key.strip():
            raise InputError(f"--set {setting!r}: write KEY=VALUE, e.g. --set train.steps=10")
        try:
            given[key.strip()] = YAML(typ="safe", pure=True).load(io.StringIO(text))
        except (YAMLError, ValueError, KeyError, RecursionError):  # the latter from `2026-02-31` or `!!bool maybe`
            raise InputError(f"--set {setting!r}: the value is not YAML") from None
    for key, value in given.items():
        *parents, last = key.split(".")
        place = document
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise InputError(f"--set {key}: {parent!r} in {path} holds no keys")
        place[last] = value
    return parse(model, document, source=f"{path} with command-line overrides" if given else str(path))
