"""Merges in weight space: the methods, weights read tensor by tensor from disk, the search for scales."""
