"""The mathematics of distillation: pure functions of per-token streams. No configuration, no model, no I/O."""
