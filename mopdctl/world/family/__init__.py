"""The experiment on objectives, starts, balance and controls; `python -m mopdctl.world.family` runs it."""
