"""Pictures as people have them: turned, transparent, indexed, sixteen-bit, cut short, or made to do harm."""

from __future__ import annotations

import io
import struct
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from pictures import TURNS, exif, saved
from triptych.errors import MediaError
from triptych.media.image import ImageLimits, decode, probe

LIMITS = ImageLimits()
FORMATS = {"PNG": "PNG", "JPEG": "JPEG", "WEBP": "WebP", "GIF": "GIF", "BMP": "BMP", "TIFF": "TIFF"}
ARROW = Image.fromarray(  # red top edge, green left edge: every orientation looks different
    np.array([[[255, 0, 0]] * 48] * 8 + [[[0, 255, 0]] * 16 + [[0, 0, 255]] * 32] * 24, dtype=np.uint8)
)


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(decode(data, LIMITS))


def noise(width: int, height: int, channels: int = 3) -> Image.Image:
    values = np.random.default_rng(width * height).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(values if channels > 1 else values[..., 0])


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, depth: int, colour: int, rows: list[bytes], *chunks: bytes) -> bytes:
    """A PNG written by hand, for what Pillow does not write."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


# ── formats and labels ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_is_read_as_pillow_reads_it(kind):
    data = saved(noise(61, 40), kind)
    header = probe(data, LIMITS)
    assert (header.format, header.width, header.height) == (FORMATS[kind], 61, 40)
    assert np.array_equal(pixels(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("options", [{"lossless": True}, {"lossless": False}, {"lossless": True, "exif": exif(6)}])
def test_every_kind_of_webp_tells_its_size(options):
    header = probe(saved(noise(61, 40), "WEBP", **options), LIMITS)
    assert header.stored_size == (61, 40)


@pytest.mark.parametrize("kind", ["WEBP", "GIF", "PNG", "TIFF"])
def test_of_an_animation_the_first_frame_is_seen(kind):
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "lime", "blue")]
    options = {} if kind == "TIFF" else {"lossless": True} if kind == "WEBP" else {}
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert (pixels(data) == (255, 0, 0)).all()


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\0\0\0\x20ftypavif\0\0\0\0avifmif1", "AVIF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b"\0\0\0\x20ftypisom\0\0\0\0", "a video"),
        (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
        (b"%PDF-1.7", "PDF"),
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"hello", "no picture format"),
        (b"", "empty"),
    ],
)
def test_what_is_not_read_is_named_and_what_is_read_is_listed(data, name):
    with pytest.raises(MediaError, match=name) as caught:
        probe(data, LIMITS)
    assert "WebP" in str(caught.value.hint)


# ── orientation ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", TURNS)
def test_a_turned_picture_is_seen_upright(orientation, kind):
    turn = TURNS[orientation]
    stored = ARROW if turn is None else ARROW.transpose(turn)
    options = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}.get(kind, {})
    data = saved(stored, kind, exif=exif(orientation), **options)

    header = probe(data, LIMITS)
    seen = pixels(data)

    assert (header.width, header.height) == (48, 32) == (seen.shape[1], seen.shape[0])
    assert header.orientation == orientation
    assert np.abs(seen.astype(int) - np.asarray(ARROW)).max() <= (6 if kind == "JPEG" else 0)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_makes_no_sense_is_none(orientation):
    assert probe(saved(ARROW, "JPEG", exif=exif(orientation)), LIMITS).orientation == 1


def test_a_png_is_turned_also_when_its_exif_follows_the_pixels():
    data = saved(ARROW.transpose(Image.Transpose.ROTATE_90), "PNG")
    late = data[:-12] + chunk(b"eXIf", exif(6).tobytes().removeprefix(b"Exif\0\0")) + data[-12:]
    assert np.array_equal(pixels(late), np.asarray(ARROW))


def test_broken_exif_is_ignored():
    data = saved(ARROW, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert probe(data, LIMITS).orientation == 1


# ── colours ─────────────────────────────────────────────────────────────────────────────────────────────────────


def over_white(rgb: tuple[int, ...], alpha: int) -> np.ndarray:
    return np.round((np.array(rgb) * alpha + 255.0 * (255 - alpha)) / 255)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("alpha", [0, 1, 100, 254, 255])
def test_alpha_lies_over_white(alpha, kind):
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    data = saved(Image.new("RGBA", (4, 3), (200, 30, 90, alpha)), kind, **options)
    assert np.abs(pixels(data)[0, 0] - over_white((200, 30, 90), alpha)).max() <= 1


def test_gray_with_alpha_lies_over_white():
    assert (
        np.abs(pixels(saved(Image.new("LA", (4, 3), (50, 100)), "PNG"))[0, 0] - over_white((50,) * 3, 100)).max() <= 1
    )


def test_a_palette_keeps_its_colours_and_its_transparency():
    image = Image.new("P", (3, 1))
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    image.putdata([0, 1, 2])
    assert pixels(saved(image, "PNG")).tolist() == [[[255, 0, 0], [0, 255, 0], [0, 0, 255]]]
    assert pixels(saved(image, "PNG", transparency=1)).tolist() == [[[255, 0, 0], [255, 255, 255], [0, 0, 255]]]
    half = pixels(saved(image, "PNG", transparency=bytes([255, 0, 128])))
    assert half.tolist()[0][:2] == [[255, 0, 0], [255, 255, 255]]
    assert np.abs(half[0, 2] - over_white((0, 0, 255), 128)).max() <= 1


@pytest.mark.parametrize(
    ("depth", "colour", "row", "key", "seen"),
    [
        (1, 0, b"\x40", b"\0\1", [0, 255]),  # the same white, but see-through
        (2, 0, b"\x10", b"\0\1", [0, 255]),
        (4, 0, b"\x3a", b"\0\x0a", [51, 255]),
        (8, 0, b"\x3a\x80", b"\0\x80", [58, 255]),
        (16, 0, b"\x12\x34\x56\x78", b"\x56\x78", [18, 255]),
    ],
)
def test_the_transparent_gray_is_found_at_every_depth(depth, colour, row, key, seen):
    data = png(2, 1, depth, colour, [row], chunk(b"tRNS", key))
    assert pixels(data)[0, :, 0].tolist() == seen


def test_the_transparent_colour_is_found_at_both_depths():
    eight = png(2, 1, 8, 2, [b"\x01\x02\x03\x04\x05\x06"], chunk(b"tRNS", b"\0\4\0\5\0\6"))
    sixteen = png(2, 1, 16, 2, [b"\1\0\2\0\3\0\x44\1\x55\2\x66\3"], chunk(b"tRNS", b"\x44\1\x55\2\x66\3"))
    assert pixels(eight).tolist() == [[[1, 2, 3], [255, 255, 255]]]
    assert pixels(sixteen).tolist() == [[[1, 2, 3], [255, 255, 255]]]


def test_sixteen_bits_are_scaled_and_not_clipped():
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(4, 16)
    expected = np.round(ramp / 257).astype(int)
    for kind in ("PNG", "TIFF"):
        seen = pixels(saved(Image.fromarray(ramp), kind)).astype(int)
        assert np.abs(seen - expected[..., None]).max() <= 1


def test_big_endian_gray_is_scaled_too():
    big = png(2, 1, 16, 0, [struct.pack(">HH", 0, 65535)])
    assert pixels(big)[0, :, 0].tolist() == [0, 255]
    motorola = saved(Image.fromarray(np.array([[0, 32768, 65535]], ">u2")), "TIFF")
    assert pixels(motorola)[0, :, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize(
    ("mode", "colour", "seen"),
    [
        ("1", 1, (255,) * 3),
        ("L", 77, (77,) * 3),
        ("CMYK", (0, 255, 255, 0), (255, 0, 0)),
        ("CMYK", (0, 0, 0, 255), (0,) * 3),
    ],
)
def test_other_modes_become_the_rgb_they_mean(mode, colour, seen):
    for kind in ("TIFF", "JPEG") if mode != "1" else ("TIFF", "PNG"):
        assert np.abs(pixels(saved(Image.new(mode, (16, 16), colour), kind)).astype(int) - seen).max() <= 2


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_numbers_without_a_known_white_are_refused(dtype):
    with pytest.raises(MediaError, match="white is not known"):
        decode(saved(Image.fromarray(np.ones((4, 4), dtype)), "TIFF"), LIMITS)


# ── limits and damage ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_bomb_is_refused_from_its_header_alone(monkeypatch):
    """12,000 × 12,000 pixels in 17 KB; no decoder is asked, so no raster is allocated."""
    data = saved(Image.new("1", (12000, 12000)), "PNG")
    monkeypatch.setattr(sys.modules["triptych.media.image.decode"], "_READERS", {})
    with pytest.raises(MediaError, match=r"12,000×12,000 pixels, 144,000,000 in all; the limit is 64,000,000"):
        decode(data, LIMITS)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (ImageLimits(max_bytes=100), "bytes, the limit is 100"),
        (ImageLimits(max_pixels=1000), "2,440 in all; the limit is 1,000"),
        (ImageLimits(max_side=50), "the limit is 50 a side"),
        (ImageLimits(max_aspect=1.2), "times as long as wide"),
    ],
)
def test_each_limit_says_its_number(limits, message):
    with pytest.raises(MediaError, match=message):
        probe(saved(noise(61, 40), "PNG"), limits)


def test_a_file_that_holds_another_size_than_it_says_is_refused():
    data = bytearray(saved(noise(20, 10), "GIF"))
    data[6:10] = struct.pack("<HH", 4, 4)  # the frame is larger than its canvas
    with pytest.raises(MediaError, match="instead"):
        decode(bytes(data), LIMITS)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_cut_short_is_refused_and_the_next_one_is_read(kind):
    data = saved(noise(64, 64), kind)
    for size in (3, 11, 20, 40, len(data) // 3, len(data) * 2 // 3):
        with pytest.raises(MediaError):
            decode(data[:size], LIMITS)
    assert decode(data, LIMITS).size == (64, 64)


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damage_gives_a_picture_or_a_media_error(kind, data):
    damaged = bytearray(saved(noise(24, 17), kind, **({"exif": exif(6)} if kind != "BMP" and kind != "GIF" else {})))
    for _ in range(data.draw(st.integers(1, 6))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    limits = ImageLimits(max_pixels=1_000_000)
    try:
        image = decode(bytes(damaged), limits)
    except MediaError:
        return
    header = probe(bytes(damaged), limits)
    assert image.mode == "RGB"
    assert image.size == (header.width, header.height)


@pytest.mark.parametrize(
    "start", [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBP", b"GIF89a", b"BM", b"II*\0"]
)
def test_garbage_behind_a_signature_is_refused(start):
    garbage = np.random.default_rng(0).bytes(100_000)
    with pytest.raises(MediaError):
        decode(start + garbage, LIMITS)


@pytest.mark.parametrize(("kind", "at", "empty"), [("PNG", 33, chunk(b"tEXt", b"")), ("WEBP", 30, b"JUNK\0\0\0\0")])
def test_nobody_looks_behind_a_million_empty_chunks(kind, at, empty):
    turned = saved(ARROW, kind, exif=exif(6))
    assert probe(turned[:at] + empty + turned[at:], LIMITS).orientation == 6
    assert probe(turned[:at] + empty * 1_000_000 + turned[at:], LIMITS).orientation == 1


@pytest.mark.parametrize("empty", [b"\xff\xfe\0\2", b"\xff"], ids=["comments", "fill"])
def test_a_jpeg_that_begins_with_a_million_markers_has_no_picture(empty):
    data = saved(ARROW, "JPEG")
    assert probe(data[:2] + empty + data[2:], LIMITS).format == "JPEG"
    with pytest.raises(MediaError, match="hold no frame header"):
        probe(data[:2] + empty * 1_000_000 + data[2:], LIMITS)


def test_pillows_global_switches_stay_as_they_were(monkeypatch):
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    decode(saved(noise(64, 64), "PNG"), LIMITS)
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)  # whatever another library sets
    assert decode(saved(noise(64, 64), "PNG"), LIMITS).size == (64, 64)
