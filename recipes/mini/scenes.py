"""Compose scenes of one to four drawings on a plain, graded or noisy background."""

from __future__ import annotations

import math
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from recipes.mini.assets import HELD_OUT, STYLES
from recipes.mini.prepare import SPRITES, concepts

SIDE = 224  # pixels
GRID = 7
MAX_OBJECTS = 4
COLOURS = {
    "red": (200, 40, 40),
    "orange": (245, 140, 30),
    "yellow": (245, 220, 60),
    "green": (50, 150, 70),
    "blue": (45, 90, 200),
    "purple": (120, 50, 160),
    "pink": (245, 160, 195),
    "brown": (120, 75, 40),
    "gray": (135, 135, 135),
    "black": (22, 22, 22),
    "white": (245, 245, 245),
}
COLOUR_NAMES = list(COLOURS)
SIZES = {1: (0.39, 0.92), 2: (0.33, 0.54), 3: (0.30, 0.45), 4: (0.29, 0.44)}  # of a side
AXIS = np.linspace(-1, 1, SIDE, dtype=np.float32)
Floats = NDArray[np.float32]
Rng = np.random.Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A picture with its truth. cover: (MAX_OBJECTS, GRID, GRID), the visible share of each cell."""

    pixels: NDArray[np.uint8]
    colour: int
    concept_ids: tuple[int, ...]
    cover: Floats


class Stage:
    """The drawings to compose from; not shared between processes."""

    def __init__(self) -> None:
        cv2.setNumThreads(1)
        archive = np.load(SPRITES)
        self.sprites = archive["sprites"]
        self.has = archive["has"]
        self.names = [row["name"] for row in concepts()]
        self.held_out = [STYLES.index(HELD_OUT)]
        self.training = [i for i, style in enumerate(STYLES) if style != HELD_OUT]

    def scene(self, rng: Rng, styles: list[int], count: int, augment: bool) -> Scene:
        """One scene of `count` different concepts, each in any of `styles`."""
        colour, picture = background(rng)
        able = np.flatnonzero(self.has[:, styles].any(1))
        places = scatter(rng, count)
        ids = tuple(int(i) for i in rng.choice(able, len(places), replace=False))
        cover = np.zeros((MAX_OBJECTS, GRID, GRID), np.float32)
        for j, (concept, (x, y, size)) in enumerate(zip(ids, places, strict=True)):
            style = rng.choice([s for s in styles if self.has[concept, s]])
            sprite = self.sprites[concept, style].astype(np.float32)
            if augment and rng.random() < 0.65:
                sprite = redraw(sprite, rng)
            if augment and rng.random() < 0.4:
                sprite = sprite[:, ::-1]
            alpha = paste(picture, np.ascontiguousarray(sprite), warp(rng, x, y, size))
            share = cv2.resize(alpha, (GRID, GRID), interpolation=cv2.INTER_AREA)
            cover[:j] *= 1 - share
            cover[j] = share
        if augment:
            picture = retouch(picture, rng)
        pixels = np.clip(picture, 0, 255).astype(np.uint8)
        return Scene(pixels=pixels, colour=colour, concept_ids=ids, cover=cover)


def background(rng: Rng) -> tuple[int, Floats]:
    """A colour's index and a picture of it: plain, graded or noisy."""
    colour = int(rng.integers(len(COLOURS)))
    base = np.array(COLOURS[COLOUR_NAMES[colour]], np.float32) + rng.normal(0, 9, 3).astype(np.float32)
    picture = np.empty((SIDE, SIDE, 3), np.float32)
    picture[:] = base
    kind = rng.random()
    if 0.45 <= kind < 0.75:
        angle = rng.random() * 2 * math.pi
        slope = math.cos(angle) * AXIS[None, :] + math.sin(angle) * AXIS[:, None]
        picture += slope[..., None] * np.float32(rng.uniform(6, 26))
    elif kind >= 0.75:
        cells = int(rng.choice([8, 16, 32, 112]))
        noise = rng.normal(0, rng.uniform(4, 14), (cells, cells, 1 if rng.random() < 0.6 else 3))
        how = cv2.INTER_LINEAR if rng.random() < 0.7 else cv2.INTER_NEAREST
        grain = cv2.resize(noise.astype(np.float32), (SIDE, SIDE), interpolation=how)
        picture += grain[..., None] if grain.ndim == 2 else grain
    return colour, picture


def scatter(rng: Rng, count: int) -> list[tuple[float, float, float]]:
    """Centres and sizes in pixels that hardly overlap; tries again with looser rules until all have room."""
    low, high = SIZES[count]
    for attempt in range(1000):
        near = max(0.30, 0.47 - 0.0004 * attempt)
        places: list[tuple[float, float, float]] = []
        for _ in range(40):
            size = rng.uniform(low, high) * SIDE
            x, y = rng.uniform(size * 0.48, SIDE - size * 0.48, 2)
            if all(math.hypot(x - a, y - b) > near * (size + s) for a, b, s in places):
                places.append((x, y, size))
            if len(places) == count:
                return places
    raise AssertionError(f"no room for {count} objects")


def warp(rng: Rng, x: float, y: float, size: float) -> NDArray[np.float64]:
    """The affine map that puts a sprite at (x, y) a little turned, stretched and sheared."""
    angle, stretch, shear = rng.normal(0, 0.16), math.exp(rng.normal(0, 0.06)), rng.normal(0, 0.06)
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    return np.hstack([turn @ np.array([[1, shear], [0, 1]]) @ np.diag([stretch, 1 / stretch]) * size, [[x], [y]]])


def paste(picture: Floats, sprite: Floats, place: NDArray[np.float64]) -> Floats:
    """Lay a premultiplied sprite over the picture in place; return its alpha."""
    side = sprite.shape[0]
    linear = place[:, :2] / side
    scale = math.sqrt(abs(np.linalg.det(linear)))
    if scale < 0.75:
        sprite = cv2.GaussianBlur(sprite, (0, 0), 0.35 / scale)
    shift = place[:, 2] - linear @ np.array([side / 2, side / 2])
    drawn = cv2.warpAffine(sprite, np.hstack([linear, shift[:, None]]), (SIDE, SIDE), flags=cv2.INTER_LINEAR)
    picture *= 1 - drawn[..., 3:] / 255
    picture += drawn[..., :3]
    return np.ascontiguousarray(drawn[..., 3]) / np.float32(255)


def redraw(sprite: Floats, rng: Rng) -> Floats:
    """The same drawing as another hand might do it: other contrast, less colour, outlined."""
    sprite = sprite.copy()
    alpha = sprite[..., 3:]
    if rng.random() < 0.35:
        grey = alpha * np.float32(0.5)
        sprite[..., :3] = (sprite[..., :3] - grey) * rng.uniform(0.65, 1.3) + grey
        sprite[..., :3] += alpha * rng.normal(0, 0.06, 3).astype(np.float32)
    if rng.random() < 0.25:
        mean = sprite[..., :3].mean(-1, keepdims=True)
        fade = np.float32(rng.uniform(-0.5, 1.0))
        sprite[..., :3] = sprite[..., :3] * (1 - fade) + mean * fade
    if rng.random() < 0.15:
        mix = np.eye(3) + rng.normal(0, 0.12, (3, 3))
        sprite[..., :3] = sprite[..., :3] @ mix.astype(np.float32)
    sprite[..., :3] = np.clip(sprite[..., :3], 0, alpha)
    return outline(sprite, rng) if rng.random() < 0.45 else sprite


def outline(sprite: Floats, rng: Rng) -> Floats:
    """The drawing with dark lines along its edges and around it."""
    sprite = np.pad(sprite, ((6, 6), (6, 6), (0, 0)))
    alpha = sprite[..., 3]
    if rng.random() < 0.6:
        edges = cv2.Canny(sprite[..., :3].astype(np.uint8), 80, 200)
        edges = cv2.dilate(edges, np.ones((int(rng.integers(2, 5)),) * 2, np.uint8))
        lines = (edges > 0) * (alpha / 255) * np.float32(rng.uniform(0.6, 1))
        sprite[..., :3] *= 1 - lines[..., None]
    width = int(rng.choice([5, 7, 9]))
    grown = cv2.dilate(alpha, cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (width, width)))
    shade = np.float32(rng.uniform(0, 40) if rng.random() < 0.85 else 255)
    sprite[..., :3] += np.clip(grown - alpha, 0, 255)[..., None] * shade / 255
    sprite[..., 3] = np.maximum(grown, alpha)
    return sprite


def retouch(picture: Floats, rng: Rng) -> Floats:
    """Brightness, blur and grain over the whole picture."""
    if rng.random() < 0.3:
        picture = picture * np.float32(rng.uniform(0.8, 1.15)) + np.float32(rng.normal(0, 8))
    if rng.random() < 0.25:
        picture = cv2.GaussianBlur(picture, (0, 0), rng.uniform(0.4, 2.0))
    if rng.random() < 0.2:
        grain = rng.standard_normal(picture.shape, dtype=np.float32)
        picture = picture + grain * np.float32(rng.uniform(2, 9))
    return picture
