"""Keep, merge or pool an item's rows, so that fewer tokens stand in the prompt."""

from triptych.media.reduce.reduction import Reduced, reduce

__all__ = ["Reduced", "reduce"]
