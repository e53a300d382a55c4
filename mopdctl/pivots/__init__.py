"""PivotRL: the turns of expert trajectories at which a model sometimes fails, as single-turn problems."""
