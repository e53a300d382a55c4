"""Reinforcement learning on verifiable rewards, on the shared loop."""
