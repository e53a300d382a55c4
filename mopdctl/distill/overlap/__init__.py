"""`mopdctl overlap`: how far the student's own answers lie inside each teacher's support, measured before a run."""
