"""Multi-teacher on-policy distillation: the student writes, and the one teacher of its domain weighs every token."""
