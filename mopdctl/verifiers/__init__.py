"""Scorers of answers against references: one interface, `verify(name, response, reference)`, for training and evaluation."""

from mopdctl.verifiers.base import Verdict, VerdictState
from mopdctl.verifiers.registry import VERIFIERS, verify

__all__ = ["VERIFIERS", "Verdict", "VerdictState", "verify"]
