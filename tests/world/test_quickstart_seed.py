"""A workspace holds the world of one seed."""

from pathlib import Path

import pytest

from mopdctl.errors import InputError
from mopdctl.files import write_json


def test_the_world_of_another_seed_is_refused(tmp_path: Path) -> None:
    from mopdctl.cli.quickstart import _prepare
    from mopdctl.runs import Workspace

    (tmp_path / "configs").mkdir()
    write_json(tmp_path / "configs" / ".complete.json", {"seed": 0})
    _prepare(Workspace(tmp_path), None, 0)
    with pytest.raises(InputError, match="holds the world of seed 0, not 1; give another --workspace"):
        _prepare(Workspace(tmp_path), None, 1)
