"""Small deterministic tool environments: pure Python, no model, no I/O. A state is a function of setup and calls."""
