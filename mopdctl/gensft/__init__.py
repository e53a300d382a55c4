"""Synthetic SFT data from a committee of models: pure stages over an append-only journal of raw answers."""
