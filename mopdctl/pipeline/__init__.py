"""Several commands as one: what a result has to be held against."""
