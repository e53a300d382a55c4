"""Evaluation: lm-eval runs saved under a name, and the recovery table that compares them."""
