"""A file of candidates for `mopdctl overlap --candidates`: models that might teach one domain."""

from pydantic import Field

from mopdctl.config.base import Strict
from mopdctl.config.train import Dtype


class Candidate(Strict):
    """A model that might become a teacher."""

    model: str
    """A name in the workspace, a folder (relative to the teachers.yaml) or a hub id."""
    dtype: Dtype = "float32"
    """Precision in which it scores."""


class CandidatesFile(Strict):
    """The models to rank, beside the teachers that serve the domain."""

    candidates: dict[str, Candidate] = Field(min_length=1)
    """Alias to model."""
