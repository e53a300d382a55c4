"""The weights of one model of a merge: what may be merged, and its tensors in the precision of the arithmetic."""

from dataclasses import dataclass

from torch import Tensor

from mopdctl.engines.weights import Shapes, StoredTensors, checkpoint_file, open_tensors, read_config, skeleton
from mopdctl.errors import InputError


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of one checkpoint by name, those left out that are tied to another."""

    stored: StoredTensors
    shapes: Shapes

    @property
    def path(self) -> str:
        """The folder or hub id."""
        return self.stored.path

    def tensor(self, name: str) -> Tensor:
        """One tensor on the CPU: float64 if it holds floating point numbers. Raises InputError for NaN or infinity."""
        found = self.stored.tensor(name)
        if not found.is_floating_point():
            return found
        found = found.double()
        if not found.sum().isfinite():  # one pass; in float64 no sum of sound weights comes near infinity
            raise InputError(f"model {self.path}: {name} holds NaN or infinity; the checkpoint is broken")
        return found


def open_weights(path: str) -> Weights:
    """Opens the safetensors files of a folder or hub id.

    Raises InputError for a LoRA adapter, for quantized weights, and where there is no model that transformers can read.
    """
    if checkpoint_file(path, "adapter_config.json"):
        raise InputError(
            f"model {path}: is a LoRA adapter; a merge needs whole weights: fold it into its base and save the "
            "result (peft: merge_and_unload)"
        )
    config = read_config(path)
    if getattr(config, "quantization_config", None):
        raise InputError(f"model {path}: its weights are quantized; merge the checkpoint that was quantized")
    # Some checkpoints hold an embedding under both of its names, and nobody reads it under the second.
    tied = set(skeleton(path, config).all_tied_weights_keys)
    stored = open_tensors(path)
    return Weights(stored, {name: shape for name, shape in stored.shapes.items() if name not in tied})


def check_shapes(alias: str, student: Shapes, teacher: Shapes) -> None:
    """Raises InputError unless a teacher has exactly the student's tensors, by name and shape."""
    differing = sorted(n for n in student.keys() | teacher.keys() if student.get(n) != teacher.get(n))
    if differing:
        name = differing[0]
        raise InputError(
            f"teacher {alias!r}: not of the student's architecture ({name} is {teacher.get(name, 'missing')} in the "
            f"teacher, {student.get(name, 'missing')} in the student); a merge needs one architecture"
        )
