"""A part's fp32 graph in torch: with gradients, and with its values in reach."""

from triptych.backends.torch_graph.part import Hooks, TorchPart

__all__ = ["Hooks", "TorchPart"]
