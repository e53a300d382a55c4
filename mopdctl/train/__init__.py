"""The one training loop, blind to the algorithm: SFT, RL and MOPD differ in the token losses and streams they feed it."""
