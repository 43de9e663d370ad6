"""A part's fp32 graph in torch: with gradients, and with its values in reach."""

from triptych.backends.torch_graph.part import Hooks, Run, TorchPart

__all__ = ["Hooks", "Run", "TorchPart"]
