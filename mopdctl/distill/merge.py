"""Task arithmetic with one scale: as a control, and as the place where `distill` may begin."""

from pathlib import Path

from mopdctl.config.merge import MergeConfig
from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.merging.methods import method_of
from mopdctl.distill.merging.run import merge_teachers
from mopdctl.distill.merging.sources import load_into, open_sources
from mopdctl.engines.hf import HFModel
from mopdctl.runs import Workspace


def merge_into(student: HFModel, config: TeachersFile, workspace: Workspace, *, base: Path, scale: float) -> None:
    """Replaces the student's weights by student + `scale` times the sum of teacher deltas.

    Weights are read from disk, tensor by tensor and in full precision whatever teachers score in. Raises InputError
    for a teacher of another architecture.
    """
    how = MergeConfig(scale=scale)
    sources = open_sources(config, workspace, base=base)
    load_into(student, sources.merge(method_of(how), sources.scales(how)))


def run_merge(config: TeachersFile, workspace: Workspace, *, base: Path, scale: float, name: str) -> Path:
    """Writes the checkpoint `name`: student plus `scale` times the sum of teacher deltas. See `merge_teachers`."""
    return merge_teachers(config, MergeConfig(scale=scale), workspace, base=base, name=name)
