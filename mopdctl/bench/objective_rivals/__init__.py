"""Scripts that the objective bench runs, ours and its rivals' alike, each in its own process and environment."""
