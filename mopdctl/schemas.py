"""`schemas/`: what users may write, generated from the configuration models, and the layout of the rollout store.

    python -m mopdctl.schemas            write schemas/
    python -m mopdctl.schemas --check    exit 3 if a schema is not what its model says

A file names its schema in its first line: `# yaml-language-server: $schema=../schemas/teachers.schema.json`.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from mopdctl.config.base import Strict
from mopdctl.config.committee import CommitteeFile
from mopdctl.config.gensft import GenConfig
from mopdctl.config.overlap import CandidatesFile
from mopdctl.config.quant import QuantConfig
from mopdctl.config.rl import RlConfig
from mopdctl.config.sft import SftConfig
from mopdctl.config.teachers import TeachersFile
from mopdctl.errors import CheckFailedError, InputError, MopdctlError
from mopdctl.files import dump_json, write_text
from mopdctl.store.schema import document as store_layout

MODELS: dict[str, type[Strict]] = {
    "committee": CommitteeFile,
    "gen": GenConfig,
    "quant": QuantConfig,
    "rl": RlConfig,
    "sft": SftConfig,
    "candidates": CandidatesFile,
    "teachers": TeachersFile,
}
"""Schema name to model; `teachers` becomes `schemas/teachers.schema.json`. A new kind of file gets its line here."""

_COMMAND = "python -m mopdctl.schemas"


def schema(model: type[Strict]) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of what a user may write for `model`."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()}


def schema_texts(models: dict[str, type[Strict]] = MODELS) -> dict[str, str]:
    """File name to file content for every schema; the same models give the same bytes."""
    texts = {f"{name}.schema.json": dump_json(schema(model)) + "\n" for name, model in sorted(models.items())}
    return texts | {"store.json": dump_json(store_layout()) + "\n"}


def write(folder: Path, models: dict[str, type[Strict]] = MODELS) -> list[Path]:
    """Writes every schema into `folder`, removes those of models that are gone, and returns what it wrote."""
    texts = schema_texts(models)
    for path in folder.glob("*.json"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def check(folder: Path, models: dict[str, type[Strict]] = MODELS) -> None:
    """Raises CheckFailedError naming the first schema that is missing, differs from its model, or has no model."""
    texts = schema_texts(models)
    for name, text in texts.items():
        path = folder / name
        if not path.is_file():
            raise CheckFailedError(f"{path}: missing; run `{_COMMAND}`")
        if path.read_bytes() != text.encode():
            raise CheckFailedError(f"{path}: stale, its model says something else; run `{_COMMAND}`")
    for path in sorted(folder.glob("*.json")):
        if path.name not in texts:
            raise CheckFailedError(f"{path}: no model has this schema; run `{_COMMAND}`")


def checkout_folder() -> Path:
    """`schemas/` of this checkout. Raises InputError in an installed package, where there is nothing to keep fresh."""
    root = Path(__file__).resolve().parents[1]
    if not (root / "pyproject.toml").is_file():
        raise InputError(f"{root}: not a checkout of mopdctl; schemas are written and checked in one")
    return root / "schemas"


def main(arguments: list[str] | None = None) -> int:
    """Writes or checks the schemas; returns the exit code."""
    parser = argparse.ArgumentParser(prog=_COMMAND, description="Write the JSON Schemas of the configuration files.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 3 if a schema is stale")
    parser.add_argument("--folder", type=Path, help="where the schemas lie (default: schemas/ of this checkout)")
    options = parser.parse_args(arguments)
    try:
        folder = options.folder or checkout_folder()
        if options.check:
            check(folder)
        else:
            sys.stdout.write("".join(f"{path}\n" for path in write(folder)))
    except MopdctlError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
