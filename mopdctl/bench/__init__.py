"""Measured claims: each bench runs mopdctl against a rival on this computer and holds the figures to a bar."""
