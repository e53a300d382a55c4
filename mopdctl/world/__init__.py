"""The tiny world of the quickstart: verifiable domains, prompts without end, and models small enough for a laptop."""
