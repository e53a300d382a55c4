"""The commands: parse, call, print. Heavy imports stay inside command bodies, so that help answers at once."""
