"""Prompts through an engine into the rollout store, resumable at every token."""
