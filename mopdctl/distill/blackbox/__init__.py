"""Teachers without log-probabilities: training on their answers, and a discriminator in their place."""
