"""Student and distinct teachers of a merge, checked against each other, and the tensors that they merge to."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mopdctl.config.merge import DEFAULT_SCALES, MergeConfig
from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.merging.methods import Combine
from mopdctl.distill.merging.weights import Weights, check_shapes, open_weights
from mopdctl.engines.hf import HFModel
from mopdctl.engines.tokenizers import ChatTokenizer, TokenizerIdentity, differences, identify
from mopdctl.errors import InputError
from mopdctl.runs import Workspace

Scales = tuple[float, ...]
"""One per distinct teacher, in the order of `Sources.teachers`."""


@dataclass(frozen=True, slots=True)
class Source:
    """One teacher checkpoint, under all its aliases."""

    aliases: tuple[str, ...]
    weights: Weights


@dataclass(frozen=True, slots=True)
class Sources:
    """What a merge is made of. Teachers are sorted by alias: their order in the file means nothing."""

    student: Weights
    teachers: tuple[Source, ...]

    def scales(self, how: MergeConfig) -> Scales:
        """The scale of each distinct teacher.

        Raises InputError for an unknown alias, for two scales of one checkpoint, and if no scale is above 0.
        """
        aliases = sorted(alias for source in self.teachers for alias in source.aliases)
        if unknown := sorted(how.scales.keys() - set(aliases)):
            raise InputError(f"scale of {unknown[0]!r}: no such teacher; teachers: {', '.join(aliases)}")
        common = DEFAULT_SCALES[how.method] if how.scale is None else how.scale
        found = []
        for source in self.teachers:
            own = {alias: how.scales[alias] for alias in source.aliases if alias in how.scales}
            if len(set(own.values())) > 1:
                raise InputError(f"scales of {' and '.join(own)}: they are one checkpoint, which has one scale")
            found.append(next(iter(own.values()), common))
        if not any(found):
            raise InputError("scales: all are 0, which merges nothing; give some teacher a scale above 0")
        return tuple(found)

    def by_alias(self, scales: Scales) -> dict[str, float]:
        """Alias to scale."""
        pairs = zip(self.teachers, scales, strict=True)
        return dict(sorted((alias, scale) for source, scale in pairs for alias in source.aliases))

    def merge(self, combine: Combine, scales: Scales) -> dict[str, Tensor]:
        """The merged tensors in float32 by their names on disk; integers are the student's.

        One tensor of one teacher is in memory at a time, beside the student's and the result.
        """
        merged = {}
        for name in self.student.shapes:
            tensor = self.student.tensor(name)
            if tensor.is_floating_point():
                tensor = combine(tensor, (source.weights.tensor(name) for source in self.teachers), scales).float()
            merged[name] = tensor
        return merged


def open_sources(config: TeachersFile, workspace: Workspace, *, base: Path) -> Sources:
    """Opens student and teachers and reads no weights yet. Aliases of one checkpoint are one teacher.

    Raises InputError naming the alias of a teacher that cannot be read, does not read the student's tokens as the
    student wrote them, or is of another architecture.
    """
    path = workspace.resolve_model(config.student, relative_to=base)
    student, tokens = open_weights(path), _tokenizer(path)
    opened: dict[str, Weights] = {}
    aliases: dict[str, list[str]] = {}
    for alias, teacher in sorted(config.teachers.items()):
        try:
            if not teacher.model:
                raise InputError("is known by its answers alone; a merge needs weights, so take it out of the file")
            path = workspace.resolve_model(teacher.model, relative_to=base)
            key = str(Path(path).resolve()) if Path(path).exists() else path
            if key not in opened:
                opened[key] = open_weights(path)
                if found := differences(tokens, _tokenizer(path)):
                    raise InputError(
                        f"{teacher.model} differs from student {config.student} in {'; '.join(found)}; only models "
                        "that read the same tokens can be merged"
                    )
        except InputError as error:
            raise InputError(f"teacher {alias!r}: {error}") from None
        check_shapes(alias, student.shapes, opened[key].shapes)
        aliases.setdefault(key, []).append(alias)
    return Sources(student, tuple(Source(tuple(names), opened[key]) for key, names in aliases.items()))


def _tokenizer(path: str) -> TokenizerIdentity:
    chat = ChatTokenizer.load(path)
    return identify(chat)


@torch.no_grad()
def load_into(student: HFModel, merged: dict[str, Tensor]) -> None:
    """Replaces the student's weights. Names are those on disk, which differ from the model's where it fuses experts.

    Raises InputError where the tensors are not exactly those of the model.
    """
    model = student.model
    loaded, found = type(model).from_pretrained(
        None, config=model.config, state_dict=merged, dtype=torch.float32, output_loading_info=True
    )
    wrong = sorted(str(name) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in found[key])
    if wrong:
        raise InputError(f"model {model.name_or_path}: {wrong[0]} on disk does not fit the model; save it again")
    own = model.state_dict()
    for name, tensor in loaded.state_dict().items():
        own[name].copy_(tensor)
