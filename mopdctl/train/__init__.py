"""The one training loop, blind to the algorithm: SFT and MOPD differ in the token losses and streams they feed it."""
