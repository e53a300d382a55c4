"""The teachers of a run: loaded once per checkpoint, compared with the student before the first step."""

from dataclasses import dataclass
from pathlib import Path

from mopdctl.config.teachers import TeachersFile
from mopdctl.config.train import Dtype
from mopdctl.engines.hf import HFModel
from mopdctl.engines.tokenizers import differences, identify
from mopdctl.errors import InputError
from mopdctl.runs import Workspace


@dataclass(frozen=True, slots=True)
class Teachers:
    """Frozen scorers by alias."""

    by_alias: dict[str, HFModel]

    def __getitem__(self, alias: str) -> HFModel:
        return self.by_alias[alias]


def load_teachers(
    config: TeachersFile, student: HFModel, workspace: Workspace, *, base: Path, dtype: Dtype | None = None
) -> Teachers:
    """Loads every teacher. Raises InputError if one does not speak the student's tokens.

    Aliases that name the same checkpoint in the same precision share one copy in memory. A teacher whose embedding is
    padded to another size is fine: logits are cut to the real vocabulary. `dtype` overrides that of each teacher. They
    come sorted by alias, so that their order in the file means nothing.
    """
    loaded: dict[tuple[str, Dtype], HFModel] = {}
    by_alias = {}
    own = identify(student)
    for alias, teacher in sorted(config.teachers.items()):
        path = workspace.resolve_model(teacher.model, relative_to=base)
        key = (str(Path(path).resolve()) if Path(path).exists() else path, dtype or teacher.dtype)
        if key not in loaded:
            loaded[key] = HFModel.load(path, dtype=key[1], batch_size=config.train.sampling_batch_size)
            found = differences(own, identify(loaded[key]))
            if found:
                raise InputError(
                    f"teacher {alias!r} ({teacher.model}): differs from student {config.student} in "
                    f"{'; '.join(found)}; a teacher must read the student's tokens as the student wrote them"
                )
            if loaded[key].vocab_size != student.vocab_size:
                raise InputError(
                    f"teacher {alias!r} ({teacher.model}): its embedding has {loaded[key].vocab_size} rows for the "
                    f"{student.vocab_size} tokens of the student; every token needs one"
                )
        by_alias[alias] = loaded[key]
    return Teachers(by_alias)
