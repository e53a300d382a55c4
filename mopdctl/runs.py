"""The workspace: named checkpoints, evaluations, rollouts and runs, and the cards that say what made them."""

import difflib
import fcntl
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mopdctl import __version__
from mopdctl.errors import InputError
from mopdctl.files import file_digest, fingerprint, read_json, sync_folder, write_json

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_name(name: str) -> str:
    """Returns `name` if it can name something in a workspace, so that it cannot lead out of it. Else InputError."""
    if not _NAME.fullmatch(name):
        raise InputError(f"name {name!r}: use 1-100 letters, digits, '.', '_' or '-', beginning with a letter or digit")
    return name


@dataclass(frozen=True, slots=True)
class Workspace:
    """A folder in which checkpoints, evaluations and runs live under names."""

    root: Path

    def __post_init__(self) -> None:
        """Raises InputError if the root is there and is not a folder."""
        if self.root.exists() and not self.root.is_dir():
            raise InputError(f"{self.root}: is a file; a workspace is a folder")

    def checkpoint(self, name: str) -> Path:
        """A Hugging Face model folder plus `card.json`."""
        return self.root / "checkpoints" / check_name(name)

    def evaluation(self, name: str) -> Path:
        """`scores.json`, `samples.jsonl`, `card.json` and the harness's own files under `lm_eval/`."""
        return self.root / "evals" / check_name(name)

    def rollouts(self, name: str) -> Path:
        """A rollout store."""
        return self.root / "rollouts" / check_name(name)

    def dataset(self, name: str) -> Path:
        """A data set that `gen-sft` wrote: `data/`, `README.md`, `manifest.json`, `quarantine/`."""
        return self.root / "datasets" / check_name(name)

    def pivots(self, name: str) -> Path:
        """Candidates of expert trajectories, their profiles, and what was selected of them."""
        return self.root / "pivots" / check_name(name)

    def run(self, name: str) -> Path:
        """The resolved configuration, `metrics.jsonl` and resumable state of one training run."""
        return self.root / "runs" / check_name(name)

    def resolve_model(self, model: str, *, relative_to: Path | None = None) -> str:
        """What `from_pretrained` should load: a name in this workspace, else a path, else a hub id."""
        if _NAME.fullmatch(model) and (named := self.checkpoint(model)).is_dir():
            return str(named)
        for base in [relative_to, Path()] if relative_to else [Path()]:
            if model and (base / model).expanduser().is_dir():
                return str((base / model).expanduser())
        if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.startswith("."):
            return model
        known = sorted(p.name for p in (self.root / "checkpoints").glob("[!.]*") if p.is_dir())
        near = difflib.get_close_matches(model, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f" (has: {', '.join(known) or 'none'})"
        if model.startswith("."):
            hint += f"; looked in {((relative_to or Path()) / model).resolve()}"
        raise InputError(f"model {model!r}: neither a folder, a hub id, nor a checkpoint in {self.root}{hint}")


_ABOUT = ("card.json", "teacher_manifest.json", "mopdctl_quantization.json")


def checkpoint_digest(folder: Path) -> str:
    """The digest of a checkpoint's weights, configuration and tokenizer files, by name and content.

    What tells how it was made does not count: equal models have equal digests.
    """
    patterns = ("*.safetensors", "*.json", "*.jinja", "*.model")
    files = sorted(p for pattern in patterns for p in folder.glob(pattern) if p.name not in _ABOUT)
    return fingerprint({p.name: file_digest(p) for p in files})


def model_identity(path: str) -> str:
    """The digest of a local checkpoint, or the hub id as it is."""
    return checkpoint_digest(Path(path)) if Path(path).is_dir() else path


def read_card(folder: Path) -> dict[str, Any]:
    """The `card.json` of a checkpoint or evaluation; empty if the folder has none (not made by mopdctl)."""
    path = folder / "card.json"
    return dict(read_json(path)) if path.exists() else {}


def write_card(folder: Path, card: dict[str, Any]) -> None:
    """Writes `card.json`, with the versions of what made it."""
    write_json(folder / "card.json", {"schema": "mopdctl.card/1", **card, "versions": package_versions()})


def package_versions() -> dict[str, str]:
    """Versions of everything that can change a number."""
    found = {"mopdctl": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "tokenizers", "lm_eval", "datasets", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@contextmanager
def building(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its place when the block ends well, and is removed otherwise."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.building"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for file in temporary.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        else:
            sync_folder(file)
    sync_folder(temporary)
    old = target.parent / f".{target.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    temporary.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder for one writer. Raises InputError if another process has it; a killed process lets go."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{folder}: another process is writing here; wait for it or use another name") from None
        yield


def open_run(folder: Path, config: dict[str, Any]) -> None:
    """Creates a run folder with its resolved configuration, or checks that an existing one was made by the same.

    Raises InputError naming the keys that differ: a run resumes only what it began.
    """
    path = folder / "config.json"
    if path.exists():
        before = read_json(path)
        if before != config:
            raise InputError(
                f"{folder}: was begun with another configuration ({told_differences(before, config)}); "
                "use another name, restore the configuration, or delete the folder"
            )
        return
    write_json(path, config)


def told_differences(before: dict[str, Any], after: dict[str, Any]) -> str:
    """At which dotted keys two JSON-like documents differ, and how: `seed was 1, now 2`. The first five of them."""
    found = list(_differences(before, after))
    told = [f"{key} was {_brief(one)}, now {_brief(other)}" for key, one, other in found[:5]]
    return "; ".join([*told, f"and {len(found) - 5} more"] if len(found) > 5 else told)


def _differences(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted key and both values, as deep as both are mappings."""
    for key in sorted(before.keys() | after.keys()):
        one, other = before.get(key), after.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _differences(one, other, f"{prefix}{key}.")
        elif one != other:
            yield f"{prefix}{key}", one, other


def _brief(value: Any) -> str:
    if value is None:
        return "not set"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def finished(checkpoint: Path, run: Path | None, config: dict[str, Any]) -> bool:
    """Whether what `config` makes is there already.

    Raises InputError if something else has the name, so that it is neither replaced nor taken for ours.
    """
    if not checkpoint.exists():
        return False
    if run and (run / "config.json").exists():
        open_run(run, config)
    card = read_card(checkpoint)
    if card.get("fingerprint") != fingerprint(config):
        known = card.get("config")
        differing = f" ({told_differences(known, config)})" if isinstance(known, dict) else ""
        raise InputError(f"{checkpoint}: something else has this name{differing}; use another name")
    return True


def check_name_is_ours(checkpoint: Path, run: Path, config: dict[str, Any]) -> None:
    """Raises InputError if something else has the name, finished or begun. Writes nothing."""
    if not finished(checkpoint, run, config) and (run / "config.json").exists():
        open_run(run, config)


class MetricsLog:
    """`metrics.jsonl`: one line per step. Opening it at a step drops later lines, so a resumed run has no doubles."""

    def __init__(self, path: Path, *, next_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if path.exists():
            for line in path.read_bytes().split(b"\n"):
                try:
                    row = json.loads(line)
                except ValueError:
                    continue  # the line that a kill cut short
                if row["step"] < next_step:
                    kept.append(line)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(b"".join(line + b"\n" for line in kept))
        temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """Appends one step's metrics."""
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All complete lines of a run's `metrics.jsonl`; what a kill left after the last line break is no line."""
    lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


def shipped(folder: str) -> Path:
    """Where `tasks`, `schemas` or `sample_data` lie: at the top of a checkout, inside the package of a wheel."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "share" / folder, package.parent / folder):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"{folder}: not part of this installation")
