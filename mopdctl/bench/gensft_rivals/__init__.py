"""Scripts that the gen-sft bench runs in its rivals' environments, where mopdctl is not."""
