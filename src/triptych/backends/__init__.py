"""Run one part of a model."""
