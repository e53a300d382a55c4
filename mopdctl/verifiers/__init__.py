"""Scorers of answers against references, for training and evaluation: `verify(name, response, reference)`."""

from mopdctl.verifiers.base import Attempt, Outcome, Verdict, VerdictState
from mopdctl.verifiers.limits import Limits
from mopdctl.verifiers.pool import VerifierPool
from mopdctl.verifiers.registry import VERIFIERS, verify

__all__ = ["VERIFIERS", "Attempt", "Limits", "Outcome", "Verdict", "VerdictState", "VerifierPool", "verify"]
