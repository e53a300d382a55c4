"""The wheel holds what a user needs, and an installed package finds it from any folder."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ("tasks", "sample_data", "schemas")


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Without build isolation the build needs no network: hatchling comes with the `test` extra.
    folder = tmp_path_factory.mktemp("wheel")
    run("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    run("-m", "pip", "install", "-q", "--no-deps", "--target", folder, wheel)
    return folder


def files(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_installed_package_finds_its_folders_from_elsewhere(installed: Path, tmp_path: Path) -> None:
    code = f"import json; from mopdctl.runs import shipped; print(json.dumps([str(shipped(n)) for n in {SHIPPED}]))"
    found = json.loads(run("-c", code, cwd=tmp_path, PYTHONPATH=str(installed)))
    assert found == [str(installed / "mopdctl" / "share" / name) for name in SHIPPED]


@pytest.mark.parametrize("name", SHIPPED)
def test_installed_folder_is_the_one_of_the_checkout(installed: Path, name: str) -> None:
    assert files(installed / "mopdctl" / "share" / name) == files(ROOT / name) != set()


def test_installed_command_answers_from_elsewhere(installed: Path, tmp_path: Path) -> None:
    assert "recovery" in run("-m", "mopdctl", "--help", cwd=tmp_path, PYTHONPATH=str(installed))


def test_installed_tasks_find_their_documents_from_elsewhere(installed: Path, tmp_path: Path) -> None:
    code = """
import json
from lm_eval.tasks import TaskManager
from mopdctl.runs import shipped
manager = TaskManager(include_path=str(shipped("tasks")), include_defaults=False)
loaded = manager.load(manager.all_subtasks)["tasks"]
print(json.dumps({name: len(task.eval_docs) for name, task in loaded.items()}))
"""
    found = json.loads(run("-c", code, cwd=tmp_path, PYTHONPATH=str(installed)))
    assert set(found.values()) == {500}
    assert set(found) == {path.stem for path in (ROOT / "tasks").glob("*/*.yaml")}


def test_wheel_holds_the_package_and_nothing_beside_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"mopdctl"}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mopdctl").rglob("*.py")}
    assert modules <= set(names)
