"""The teachers of a run: base weights in memory once, compared with the student before the first step."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from mopdctl.config.teachers import Teacher, TeachersFile
from mopdctl.config.train import Dtype, WeightQuant
from mopdctl.engines.adapters import AdaptedModel, SharedBase, Source, find_source
from mopdctl.engines.fake_quant import quantize_weights
from mopdctl.engines.head import backbone
from mopdctl.engines.hf import HFModel, default_device
from mopdctl.engines.tokenizers import TokenizerIdentity, differences, identify
from mopdctl.errors import InputError
from mopdctl.objective.head import Head
from mopdctl.runs import Workspace

Residency = Literal["all", "one"]
_HOST = torch.device("cpu")


class Teachers:
    """Frozen scorers by alias, all of them on the device, or (`residency="one"`) one at a time.

    With `one` the others wait in the host's memory, and refuse to run there. Adapters over one base are one: they come
    and go together.
    """

    def __init__(
        self,
        by_alias: dict[str, HFModel],
        *,
        residency: Residency = "all",
        loads: int = 0,
        sources: dict[str, Source] | None = None,
    ) -> None:
        self.by_alias = by_alias
        self.loads = loads
        """Checkpoints that were read into memory for them; adapters do not count."""
        self.sources = sources or {}
        """Where the weights of each lie."""
        self._residency = residency
        self._on_device: Any = None
        """With `one`: the module that is on the device."""
        self._running: list[str] = []
        self._refusals: dict[int, Any] = {}
        self._head: tuple[str, Head] | None = None
        self._forwarded: Counter[str] = Counter()
        if residency == "one":
            for model in by_alias.values():
                self._send_away(model.model)

    def __getitem__(self, alias: str) -> HFModel:
        """The teacher, to look at; run it inside `resident(alias)`."""
        return self.by_alias[alias]

    @contextmanager
    def resident(self, alias: str) -> Iterator[HFModel]:
        """The teacher, on the device; with `one` it takes the place of another and stays until it has to make room.

        Raises RuntimeError inside a block of another teacher that it would have to displace.
        """
        model = self.by_alias[alias]
        if self._residency == "one":
            self._bring(alias, model.model)
        _ = model.head_or_none  # the first time it is held against the model's logits, on tokens that nobody asked for
        self._running.append(alias)
        counter = backbone(model.model).register_forward_pre_hook(self._count(alias), with_kwargs=True)
        try:
            yield model
        finally:
            counter.remove()
            self._running.pop()

    def head(self, alias: str) -> Head:
        """What makes logits of the teacher's hidden states, on the device, outside of any gradient.

        With `one` only that of the teacher asked for last is kept there, and a teacher that waits does not move for it.
        """
        if self._head is None or self._head[0] != alias:
            self._head = None  # the old one goes before the new one comes
            model = self.by_alias[alias]
            if self._residency == "one" and "head" not in vars(model):
                with self.resident(alias):  # the first time it is held against the model's own logits
                    head = model.head
            else:
                head = model.head
            self._head = alias, _detached(head, default_device() if self._residency == "one" else None)
        return self._head[1]

    def park(self) -> None:
        """With `one`: sends the last teacher away too, to make room for what is not a teacher."""
        if self._residency == "one":
            self._head = None
            if self._on_device is not None:
                self._send_away(self._on_device)
                self._on_device = None

    def take_forwarded(self) -> dict[str, int]:
        """The tokens without padding that ran through each teacher in `resident` since the last call, by alias."""
        found = dict(sorted(self._forwarded.items()))
        self._forwarded.clear()
        return found

    def _bring(self, alias: str, module: Any) -> None:
        if module is self._on_device or _is_the_students(self.by_alias[alias]):
            return
        if displaced := [name for name in self._running if self.by_alias[name].model is self._on_device]:
            raise RuntimeError(f"teacher {alias!r} would displace {displaced[-1]!r}, which is running")
        self.park()
        self._refusals.pop(id(module)).remove()
        self._move(module, default_device())
        self._on_device = module

    def _send_away(self, module: Any) -> None:
        owners = [model for model in self.by_alias.values() if model.model is module]
        if id(module) in self._refusals or any(_is_the_students(model) for model in owners):
            return
        self._move(module, _HOST)
        self._refusals[id(module)] = backbone(module).register_forward_pre_hook(_refuse)

    def _move(self, module: Any, device: torch.device) -> None:
        module.to(device)
        for model in self.by_alias.values():
            if model.model is module:
                model.device = device

    def _count(self, alias: str) -> Any:
        def count(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            mask = kwargs.get("attention_mask")
            # with a cache the mask goes back further than the tokens that run now
            self._forwarded[alias] += int(mask[:, -ids.shape[1] :].sum()) if mask is not None else ids.numel()

        return count


def _refuse(*_: Any) -> None:
    raise RuntimeError("a teacher that waits in the host's memory was run; use `Teachers.resident`")


def _is_the_students(model: HFModel) -> bool:
    """Whether the weights are the student's own, with its adapter off: they stay where they are."""
    return isinstance(model, AdaptedModel) and model.shared.trained is not None


def _detached(head: Head, device: torch.device | None) -> Head:
    weight, bias = head.weight_VH.detach(), None if head.bias_V is None else head.bias_V.detach()
    if device is not None:
        weight, bias = weight.to(device), None if bias is None else bias.to(device)
    return Head(weight, bias, head.scale, head.softcap)


def load_frozen(path: str, *, dtype: Dtype, quant: WeightQuant, batch_size: int) -> HFModel:
    """A model that only scores, its weights quantized if asked for. Raises InputError naming what cannot be."""
    model = HFModel.load(path, dtype=dtype, batch_size=batch_size)
    if quant != "none":
        quantize_weights(model, path, quant)
    return model


def load_reference(config: TeachersFile, student: HFModel, workspace: Workspace, *, base: Path) -> HFModel:
    """The third model: the one named, else the student as the run begins, frozen. It reads the student's tokens too."""
    train = config.train
    if train.reference is None and isinstance(student, AdaptedModel) and train.reference_quant == "none":
        return student.shared.without_adapter()
    name = config.student if train.reference is None else train.reference
    path = workspace.resolve_model(name, relative_to=base)
    model = load_frozen(path, dtype=train.dtype, quant=train.reference_quant, batch_size=train.sampling_batch_size)
    check_tokens(f"reference ({name})", model, student, config.student, identify(student))
    return model


def teacher_source(alias: str, teacher: Teacher, workspace: Workspace, *, base: Path) -> Source:
    """Where a teacher's weights lie; `base` is the folder that relative paths start from. Reads no weights.

    Raises InputError naming the alias.
    """
    try:
        return find_source(teacher.model, workspace, relative_to=base, base=teacher.base)
    except InputError as error:
        raise InputError(f"teacher {alias!r}: {error}") from None


def load_teachers(
    config: TeachersFile, student: HFModel, workspace: Workspace, *, base: Path, dtype: Dtype | None = None
) -> Teachers:
    """Loads every teacher that gives log-probabilities. Raises InputError if one does not speak the student's tokens.

    Aliases that name the same checkpoint in the same precision, quantized alike, share one copy in memory, and so do
    adapters over it; that of a student which trains an adapter serves as well, where nothing is quantized. A teacher
    whose embedding is padded to another size is fine: logits are cut to the real vocabulary. Black boxes are left out.
    `dtype` overrides that of each teacher. They come sorted by alias, so that their order in the file means nothing.
    """
    train = config.train
    sources = {
        alias: teacher_source(alias, teacher, workspace, base=base)
        for alias, teacher in sorted(config.teachers.items())
        if not teacher.is_black_box
    }
    keys = {
        alias: (_place(source.model), dtype or teacher.dtype, teacher.quant)
        for alias, source in sources.items()
        if (teacher := config.teachers[alias])
    }
    with_adapters = {keys[alias] for alias, source in sources.items() if source.adapter is not None}
    bases: dict[tuple[str, Dtype, WeightQuant], HFModel] = {}
    shared: dict[tuple[str, Dtype, WeightQuant], SharedBase] = {}
    by_alias: dict[str, HFModel] = {}
    own = identify(student)
    for alias, source in sources.items():
        key = keys[alias]
        if source.adapter is None and (lent := _from_student(student, *key)):
            by_alias[alias] = lent
            continue
        if key not in bases:
            bases[key] = load_frozen(source.model, dtype=key[1], quant=key[2], batch_size=train.sampling_batch_size)
            if train.teacher_residency == "one":  # room for the next one
                bases[key].model.to(_HOST)
                bases[key].device = _HOST
            if key in with_adapters:
                shared[key] = SharedBase(bases[key])
                bases[key] = shared[key].without_adapter()
        by_alias[alias] = bases[key] if source.adapter is None else shared[key].load(source.adapter)
        check_tokens(
            f"teacher {alias!r} ({config.teachers[alias].model})", by_alias[alias], student, config.student, own
        )
    return Teachers(by_alias, residency=train.teacher_residency, loads=len(bases), sources=sources)


def _place(model: str) -> str:
    """What two model arguments share if they name the same checkpoint."""
    return str(Path(model).resolve()) if Path(model).exists() else model


def _from_student(student: HFModel, place: str, dtype: Dtype, quant: WeightQuant) -> HFModel | None:
    """The base of a student that trains an adapter, if that is the checkpoint asked for, in that precision."""
    if not isinstance(student, AdaptedModel) or student.shared.trained is None or quant != "none":
        return None
    path = _place(str(student.model.name_or_path))
    return student.shared.without_adapter() if (path, str(student.dtype)) == (place, f"torch.{dtype}") else None


def check_identity(who: str, found: TokenizerIdentity, student_name: str, own: TokenizerIdentity) -> None:
    """Raises InputError unless one tokenizer reads the student's tokens as the student wrote them."""
    if differing := differences(own, found):
        raise InputError(
            f"{who}: differs from student {student_name} in {'; '.join(differing)}; a {who.split(' ', 1)[0]} must read "
            "the student's tokens as the student wrote them"
        )


def check_tokens(who: str, model: HFModel, student: HFModel, student_name: str, own: TokenizerIdentity) -> None:
    """Raises InputError unless a model reads the student's tokens as the student wrote them, and knows them all.

    `who` is what the model is called, and `own` the student's identity.
    """
    check_identity(who, identify(model), student_name, own)
    if model.vocab_size != student.vocab_size:
        raise InputError(
            f"{who}: its embedding has {model.vocab_size} rows for the {student.vocab_size} tokens of the student; "
            "every token needs one"
        )
