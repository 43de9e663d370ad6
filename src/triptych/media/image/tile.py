"""Cut a picture into its family's tiles, to the pixel as transformers does with Pillow.

Everything but the pixels follows from the picture's size alone: `take`, `count`, `runs` and `prompt_text`.
Sizes are (width, height); the arithmetic keeps transformers' order of operations, so that floats round alike.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from triptych.core.spec import ImageSpec
from triptych.errors import MediaError

Size = tuple[int, int]
Tiles = NDArray[np.uint8]  # (num_tiles, side, side, 3)

MAX_SCALED_PIXELS = 64_000_000  # of a picture that is scaled before it is cropped
MAX_SPLIT_SIDE = 4096  # Idefics3's own ceiling

_FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


def count(size: Size, spec: ImageSpec) -> int:
    """Tokens that a picture of this size takes in the prompt. Raises MediaError where its family cannot show it."""
    return len(take(size, spec))


def take(size: Size, spec: ImageSpec) -> NDArray[np.int32]:
    """(num_tokens,): the rows of [tile 0, tile 1, …, extra] that stand in the prompt, in order."""
    tokens = spec.tokens_per_tile
    if spec.tiling == "split":
        return np.arange((_num_split(size, spec) + 1) * tokens, dtype=np.int32)
    if spec.tiling == "anyres":
        return _take_anyres(size, spec)
    _check_one(size, spec)
    return np.arange(tokens + spec.has_newline, dtype=np.int32)


def num_bytes(size: Size, spec: ImageSpec) -> int:
    """Of a picture's tiles, before there are any."""
    grid = 0
    if spec.tiling == "split":
        grid = _num_split(size, spec)
    elif spec.tiling == "anyres":
        width, height = _best_grid(size, spec)
        grid = width * height // spec.tile_size**2
    return 3 * spec.tile_size**2 * (grid + 1)


def runs(size: Size, spec: ImageSpec) -> tuple[int, ...]:
    """Lengths of the runs of `take` that show one thing, between marks or not: a reduction keeps its share of each.

    They are each tile (split), or the whole picture and then its grid (anyres). Newline rows belong to the grid and
    may be left out as any row of it: where a line ends is also told by the positions of those that stay.
    """
    num_tokens = count(size, spec)
    if spec.tiling == "split":
        return (spec.tokens_per_tile,) * (num_tokens // spec.tokens_per_tile)
    if spec.tiling == "anyres":
        return spec.tokens_per_tile, num_tokens - spec.tokens_per_tile
    return (num_tokens,)


def prompt_text(size: Size, spec: ImageSpec) -> str:
    """What stands in the prompt for the picture: its placeholders, and its family's marks around them."""
    tile = spec.placeholder * spec.tokens_per_tile
    whole = spec.open_mark + spec.whole_mark + tile + spec.open_mark
    if spec.tiling == "one":
        return whole + spec.placeholder * spec.has_newline
    if spec.tiling == "anyres":
        return spec.placeholder * count(size, spec)
    columns, rows = _split_grid(size, spec)
    lines = [
        "".join(spec.open_mark + spec.grid_mark.format(row=row + 1, col=column + 1) + tile for column in range(columns))
        for row in range(rows)
    ]
    return "".join(line + "\n" for line in lines) + ("\n" if lines else "") + whole


def prepare(image: Image.Image, spec: ImageSpec) -> tuple[Tiles, NDArray[np.int32]]:
    """The tiles of an upright RGB picture, and which of their rows the prompt shows. Raises MediaError."""
    rows = take(image.size, spec)
    if spec.tiling == "split":
        tiles = _split(image, spec)
    elif spec.tiling == "anyres":
        tiles = _anyres(image, spec)
    else:
        tiles = [_one(image, spec)]
    return np.stack([np.asarray(tile) for tile in tiles]), rows


def at_detail(spec: ImageSpec, detail: Literal["auto", "low", "high"]) -> ImageSpec:
    """How the family shows a picture at a request's `detail`: `low` is one tile, the others are its own choice."""
    if detail != "low" or spec.tiling == "one":
        return spec
    return msgspec.structs.replace(spec, tiling="one", fit="squash")


# ── one tile ────────────────────────────────────────────────────────────────────────────────────────────────────


def _one(image: Image.Image, spec: ImageSpec) -> Image.Image:
    side, resample = spec.tile_size, _FILTERS[spec.resample]
    if spec.fit == "shortest_crop":
        return _crop(image.resize(_shortest_edge(image.size, side), resample), side)
    if spec.fit == "pad":
        image = _pad_to_square(image, spec.pad_rgb)
    elif spec.longest_edge is not None:
        image = image.resize(_longest_edge(image.size, spec.longest_edge), resample)
    return image.resize((side, side), resample)


def _check_one(size: Size, spec: ImageSpec) -> None:
    if spec.fit == "shortest_crop":
        width, height = _shortest_edge(size, spec.tile_size)
    elif spec.fit == "pad":
        width = height = max(size)
    else:
        return
    if width * height > MAX_SCALED_PIXELS:
        raise MediaError(
            f"a {size[0]:,}×{size[1]:,} picture would become {width:,}×{height:,} before it is cut to "
            f"{spec.tile_size}×{spec.tile_size}; the limit is {MAX_SCALED_PIXELS:,} pixels",
            hint="crop it to a less extreme shape",
        )


def _shortest_edge(size: Size, side: int) -> Size:
    width, height = size
    long = int(side * max(size) / min(size))
    return (side, long) if width <= height else (long, side)


def _crop(image: Image.Image, side: int) -> Image.Image:
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def _pad_to_square(image: Image.Image, rgb: tuple[int, int, int]) -> Image.Image:
    side = max(image.size)
    square = Image.new("RGB", (side, side), rgb)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


# ── a grid of tiles, then the whole (Idefics3, SmolVLM) ─────────────────────────────────────────────────────────


def _split(image: Image.Image, spec: ImageSpec) -> list[Image.Image]:
    side, resample = spec.tile_size, _FILTERS[spec.resample]
    if spec.longest_edge is not None:
        image = image.resize(_longest_edge(image.size, spec.longest_edge), resample)
    image = image.resize(_multiples(image.size, side), resample)
    whole = image.resize((side, side), resample)  # unchanged if it is one tile already
    return [*_cut(image, side), whole] if image.size != (side, side) else [whole]


def _split_grid(size: Size, spec: ImageSpec) -> tuple[int, int]:
    """(columns, rows) of the grid; (0, 0) where the whole picture is one tile."""
    if spec.longest_edge is not None:
        size = _longest_edge(size, spec.longest_edge)
    width, height = _multiples(size, spec.tile_size)
    grid = width // spec.tile_size, height // spec.tile_size
    return grid if grid != (1, 1) else (0, 0)


def _num_split(size: Size, spec: ImageSpec) -> int:
    columns, rows = _split_grid(size, spec)
    return columns * rows


def _longest_edge(size: Size, edge: int) -> Size:
    """Scaled so that the longer side is `edge`, the other even; then below the family's ceiling."""
    width, height = size
    aspect = width / height
    if width >= height:
        width, height = edge, int(edge / aspect)
        height += height % 2
    else:
        height, width = edge, int(edge * aspect)
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    aspect = width / height
    if width >= height and width > MAX_SPLIT_SIDE:
        width, height = MAX_SPLIT_SIDE, int(MAX_SPLIT_SIDE / aspect)
    elif height > width and height > MAX_SPLIT_SIDE:
        height, width = MAX_SPLIT_SIDE, int(MAX_SPLIT_SIDE * aspect)
    return max(width, 1), max(height, 1)


def _multiples(size: Size, side: int) -> Size:
    width, height = size
    aspect = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / aspect) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * aspect) / side) * side
    return width, height


def _cut(image: Image.Image, side: int) -> list[Image.Image]:
    return [
        image.crop((left, top, left + side, top + side))
        for top in range(0, image.height, side)
        for left in range(0, image.width, side)
    ]


# ── the whole, then the best grid (LLaVA 1.6) ───────────────────────────────────────────────────────────────────


def _anyres(image: Image.Image, spec: ImageSpec) -> list[Image.Image]:
    side, resample = spec.tile_size, _FILTERS[spec.resample]
    width, height = _best_grid(image.size, spec)
    scaled = image.resize(_fit_inside(image.size, (width, height)), resample)
    canvas = Image.new("RGB", (width, height))  # black, as transformers pads
    canvas.paste(scaled, ((width - scaled.width) // 2, (height - scaled.height) // 2))
    return [image.resize((side, side), resample), *_cut(canvas, side)]


def _best_grid(size: Size, spec: ImageSpec) -> Size:
    """Of the family's grids the one that shows most of the picture and wastes least. (width, height) in pixels."""
    width, height = size

    def rank(grid: Size) -> tuple[int, int]:
        scale = min(grid[0] / width, grid[1] / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        return shown, -(grid[0] * grid[1] - shown)

    return max(((across, down) for down, across in spec.grids), key=rank)


def _fit_inside(size: Size, target: Size) -> Size:
    scale_width, scale_height = target[0] / size[0], target[1] / size[1]
    if scale_width < scale_height:
        return target[0], min(math.ceil(size[1] * scale_width), target[1])
    return min(math.ceil(size[0] * scale_height), target[0]), target[1]


def _take_anyres(size: Size, spec: ImageSpec) -> NDArray[np.int32]:
    """The whole picture's rows, then line by line those of the grid that are not padding, each line with a newline."""
    tokens = spec.tokens_per_tile
    side = math.isqrt(tokens)
    width, height = _best_grid(size, spec)
    columns, rows = width // spec.tile_size, height // spec.tile_size
    grid = np.arange(rows * columns * tokens, dtype=np.int32).reshape(rows, columns, side, side) + tokens
    lines = _unpad(grid.transpose(0, 2, 1, 3).reshape(rows * side, columns * side), size)
    if spec.has_newline:
        newline = np.full((len(lines), 1), (1 + rows * columns) * tokens, np.int32)
        lines = np.concatenate([lines, newline], axis=1)
    return np.concatenate([np.arange(tokens, dtype=np.int32), lines.reshape(-1)])


def _unpad(lines: NDArray[np.int32], size: Size) -> NDArray[np.int32]:
    width, height = size
    shown_height, shown_width = lines.shape
    if width / height > shown_width / shown_height:
        padding = (shown_height - int(round(height * (shown_width / width), 7))) // 2
        return lines[padding : shown_height - padding]
    padding = (shown_width - int(round(width * (shown_height / height), 7))) // 2
    return lines[:, padding : shown_width - padding]
