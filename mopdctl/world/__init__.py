"""The tiny world of the quickstart: verifiable domains, generators of prompts, a tokenizer and models small enough for a laptop."""
