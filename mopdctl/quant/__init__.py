"""Checkpoints in FP4 and FP8: which weights, with which scales, written tensor by tensor, and what came of it."""
