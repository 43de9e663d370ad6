"""One file a model family: its names, its spec, its preprocessing facts."""
