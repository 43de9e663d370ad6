"""Draw one emoji of one style as a trimmed, premultiplied RGBA sprite."""

from __future__ import annotations

import io
import json
import re
from functools import cache
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from recipes.mini.assets import NPM

SPRITE = 128  # pixels a side
SVG_PIXELS = 160
Sprite = NDArray[np.uint8]


def code(emoji: str) -> str:
    """The lower-case hexadecimal name of an emoji without its presentation selector."""
    return "-".join(f"{ord(c):04x}" for c in emoji if ord(c) != 0xFE0F)


def fit(image: NDArray[np.uint8]) -> Sprite | None:
    """Trim an RGBA picture to its ink and fit it into a premultiplied SPRITE×SPRITE square."""
    ys, xs = np.where(image[..., 3] > 16)
    if len(ys) < 20:
        return None
    ink = image[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1].astype(np.float32)
    ink[..., :3] *= ink[..., 3:] / 255
    height, width = ink.shape[:2]
    scale = (SPRITE - 4) / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    ink = cv2.resize(ink, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC)
    out = np.zeros((SPRITE, SPRITE, 4), np.float32)
    top, left = (SPRITE - size[1]) // 2, (SPRITE - size[0]) // 2
    out[top : top + size[1], left : left + size[0]] = ink
    out = np.clip(out, 0, 255)
    out[..., :3] = np.minimum(out[..., :3], out[..., 3:])
    return (out + 0.5).astype(np.uint8)


def raster(svg: str, side: int = SVG_PIXELS) -> NDArray[np.uint8]:
    """An SVG drawing as RGBA pixels."""
    import resvg_py

    data = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=side, height=side))
    return np.array(Image.open(io.BytesIO(data)).convert("RGBA"))


@cache
def known() -> dict[str, dict[str, Any]]:
    """Every emoji with its name and group."""
    table: dict[str, dict[str, Any]] = json.loads((NPM["names"].folder / "package/data-by-emoji.json").read_text())
    return table


@cache
def labels() -> dict[str, dict[str, Any]]:
    """Second names, by code."""
    rows = json.loads((NPM["labels"].folder / "package/en/data.json").read_text())
    return {code(row["emoji"]): row for row in rows}


@cache
def datasource(style: str) -> dict[str, dict[str, Any]]:
    """The emoji-datasource table of a style, by code."""
    rows = json.loads((NPM[style].folder / "package/emoji.json").read_text())
    return {row["unified"].lower().replace("-fe0f", ""): row for row in rows}


def squeeze(text: str) -> str:
    """Letters and digits alone: icon sets spell names with and without dashes."""
    return re.sub(r"[^a-z0-9]+", "", text.lower().replace("’", ""))


@cache
def icons(style: str) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """An iconify set: its table, its icons by code, its icons by squeezed name."""
    folder = NPM[style].folder / "package"
    table = json.loads((folder / "icons.json").read_text())
    by_code = json.loads((folder / "chars.json").read_text()) if (folder / "chars.json").exists() else {}
    by_name = {squeeze(name): name for name in table["icons"]}
    for alias, value in table.get("aliases", {}).items():
        if value["parent"] in table["icons"] and not set(value) - {"parent"}:
            by_name.setdefault(squeeze(alias), value["parent"])
    return table, by_code, by_name


def icon_name(style: str, emoji: str) -> str | None:
    """How an iconify set calls an emoji: by code where it lists codes, else by any of the emoji's names."""
    table, by_code, by_name = icons(style)
    codes = [code(emoji), "-".join(f"{ord(c):04x}" for c in emoji), "-".join(f"{ord(c):x}" for c in emoji)]
    if len(by_code) >= 50:
        return next((by_code[c] for c in codes if by_code.get(c) in table["icons"]), None)
    names = [icons("fluent-emoji-flat")[1].get(c, "") for c in codes]
    names += [known()[emoji]["name"], labels().get(code(emoji), {}).get("label", "")]
    names.append(datasource("google").get(code(emoji), {}).get("name") or "")
    return next((by_name[squeeze(n)] for n in names if n and squeeze(n) in by_name), None)


def draw(style: str, emoji: str) -> Sprite | None:
    """The sprite of an emoji in a style, or None where the style has no such drawing."""
    folder = NPM[style].folder / "package"
    if style in ("google", "twitter"):
        row = datasource(style).get(code(emoji))
        path = folder / f"img/{style}/64" / row["image"] if row else None
    elif style == "fluent3d":
        paths = [folder / f"assets/{c}.webp" for c in (code(emoji), "-".join(f"{ord(c):x}" for c in emoji))]
        path = next((p for p in paths if p.exists()), None)
    elif style == "openmoji":
        paths = [folder / f"color/svg/{c.upper()}.svg" for c in ("-".join(f"{ord(c):04X}" for c in emoji), code(emoji))]
        found = next((p for p in paths if p.exists()), None)
        return fit(raster(found.read_text())) if found else None
    else:
        return draw_icon(style, emoji)
    if path is None or not path.exists():
        return None
    return fit(np.array(Image.open(path).convert("RGBA")))


def draw_icon(style: str, emoji: str) -> Sprite | None:
    """The sprite of an emoji in an iconify set."""
    name = icon_name(style, emoji)
    if name is None:
        return None
    table = icons(style)[0]
    icon = table["icons"][name]
    width = icon.get("width", table.get("width", 16))
    height = icon.get("height", table.get("height", 16))
    box = f"{icon.get('left', 0)} {icon.get('top', 0)} {width} {height}"
    head = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return fit(raster(f'<svg {head} viewBox="{box}" width="{width}" height="{height}">{icon["body"]}</svg>'))
