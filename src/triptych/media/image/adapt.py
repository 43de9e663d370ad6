"""Show pictures otherwise than the model's own way: fewer tiles, a smaller size, some of its grids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from triptych.core.spec import ImageSpec
from triptych.errors import RequestError
from triptych.media.image.tile import at_detail

PARAM = "mm_processor_kwargs"


def adapted(spec: ImageSpec, changes: Mapping[str, Any]) -> ImageSpec:
    """The spec with a processor's settings changed; never to more than it had. Raises RequestError."""
    for name, value in changes.items():
        change = _CHANGES.get(name)
        if change is None:
            known = ", ".join(_CHANGES)
            raise RequestError(f"unknown setting `{name[:100]}`", hint=f"known are {known}", param=PARAM)
        spec = change(spec, value)
    return spec


def _do_image_splitting(spec: ImageSpec, value: Any) -> ImageSpec:
    if not isinstance(value, bool):
        raise RequestError(f"do_image_splitting is {_short(value)}, not true or false", param=PARAM)
    if value and spec.tiling == "one":
        raise RequestError("do_image_splitting: each picture is shown as one tile here", param=PARAM)
    return spec if value else at_detail(spec, "low")


def _size(spec: ImageSpec, value: Any) -> ImageSpec:
    edge = value.get("longest_edge") if isinstance(value, dict) and len(value) == 1 else None
    if spec.longest_edge is None:
        raise RequestError("size: this model's pictures have one size, which its tower was trained on", param=PARAM)
    if not isinstance(edge, int) or isinstance(edge, bool) or not spec.tile_size <= edge <= spec.longest_edge:
        hint = f'give {{"longest_edge": N}}, N from {spec.tile_size} (one tile) to {spec.longest_edge} pixels'
        raise RequestError(f"size is {_short(value)}", hint=hint, param=PARAM)
    return msgspec.structs.replace(spec, longest_edge=edge)


def _image_grid_pinpoints(spec: ImageSpec, value: Any) -> ImageSpec:
    asked = tuple(tuple(one) if isinstance(one, list) else one for one in value) if isinstance(value, list) else ()
    grids = tuple(grid for grid in spec.grids if grid in asked)
    if not grids or len(grids) != len(asked):
        known = [list(grid) for grid in spec.grids]
        raise RequestError(
            f"image_grid_pinpoints is {_short(value)}", hint=f"choose among the model's own: {known}", param=PARAM
        )
    return msgspec.structs.replace(spec, grids=grids)


def _short(value: Any) -> str:
    return repr(value)[:100]


_CHANGES: Mapping[str, Callable[[ImageSpec, Any], ImageSpec]] = {
    "do_image_splitting": _do_image_splitting,
    "size": _size,
    "image_grid_pinpoints": _image_grid_pinpoints,
}
