"""mopdctl: merge specialist teachers into one student by on-policy distillation, with proof."""

__version__ = "0.1.0"
