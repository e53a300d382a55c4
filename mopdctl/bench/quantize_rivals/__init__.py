"""The script that the quantize bench runs for every side, each in its own process and environment."""
