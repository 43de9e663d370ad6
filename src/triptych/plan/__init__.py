"""Stage 1: whether a model fits a machine, how fast it is there and what it costs."""
