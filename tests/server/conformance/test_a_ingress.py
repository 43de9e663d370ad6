"""Section A: a picture is what its bytes show, however it was turned, called or sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from PIL import Image

from asking import is_clean
from conforming import UNSEALED, ask, inspect, refused, told, uri
from pictures import TURNS, exif, saved
from scripted import eventually
from triptych.media.fetch import MediaPolicy
from triptych.session import Session
from triptych.testing import tiny_session

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
LABELS = ("image/png", "image/jpeg", "image/webp", "application/octet-stream", "text/html", "video/mp4", "", "x")


def arrow(seed: int = 0) -> Image.Image:
    """No two of its turns look alike."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (12, 20, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def session(root: Path) -> Iterator[Session]:
    policy = MediaPolicy(allowed_local_root=root, allowed_domains=frozenset({"127.0.0.1"}), allows_private=True)
    with tiny_session(policy=policy) as session:
        yield session


@pytest.fixture
def site() -> Iterator[tuple[dict[str, bytes], str]]:
    """Files by path, and where they are served."""
    files: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = files[self.path]
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *details: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield files, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_t1_every_exif_orientation_is_one_picture_to_the_model_and_its_cache(url, kind):
    lossless: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    upright = arrow(FORMATS.index(kind))
    first = told(ask(url, uri(saved(upright, "PNG"))))
    for orientation, turn in TURNS.items():
        stored = upright if turn is None else upright.transpose(turn)
        sent = uri(saved(stored, kind, exif=exif(orientation), **lossless))
        facts = inspect(url, sent)["media"][0]

        assert (facts["orientation"], facts["size"], facts["stored_size"]) == (orientation, [20, 12], [*stored.size])
        assert facts["is_encoded"]
        assert told(ask(url, sent)) == (*first[:2], 0)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_t2_what_is_transparent_is_white(url, mode):
    image = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 4, 8))
    seen = Image.new("RGB", (8, 8), "white")
    seen.paste((0, 0, 0), (0, 0, 4, 8))
    told(ask(url, uri(saved(seen, "PNG")), text=mode))
    data = saved(image.convert("LA"), "PNG") if mode == "LA" else saved(image, "PNG")
    if mode in ("P", "PA"):
        indexed = Image.new("P", (8, 8), 1)
        indexed.putpalette([0, 0, 0, 255, 0, 0])
        indexed.paste(0, (0, 0, 4, 8))
        data = saved(indexed, "GIF" if mode == "PA" else "PNG", transparency=1)

    assert inspect(url, uri(data))["media"][0]["is_encoded"]


@pytest.mark.parametrize(
    "options", [{"lossless": True}, {"quality": 80}, {"save_all": True, "append_images": [Image.new("RGB", (20, 12))]}]
)
def test_t4_webp_is_read_still_or_moving(url, options):
    assert inspect(url, uri(saved(arrow(), "WEBP", **options), "image/webp"))["media"][0]["format"] == "WebP"


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_t5_of_what_moves_the_first_frame_is_shown(url, kind):
    frames = [Image.new("RGB", (20, 12), (40 * at, 30, 200)) for at in range(4)]
    lossless: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    moving = saved(frames[0], kind, save_all=True, append_images=frames[1:], **lossless)

    assert told(ask(url, uri(moving)))[0] == told(ask(url, uri(saved(frames[0], "PNG"))))[0]


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\0\0\0\x20ftypavif\0\0\0\0avifmif1", "AVIF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
        (b"\xff\x0a\xfa\x7f", "JPEG XL"),
        (b"8BPS\0\1", "Photoshop"),
        (b"%PDF-1.7", "PDF"),
        (b"\0\0\1\0\1\0\x10\x10", "ICO"),
    ],
)
def test_t5_formats_that_are_not_read_are_named_and_those_that_are_listed(url, data, name):
    message = refused(ask(url, uri(data)))
    assert name in message
    assert "PNG, JPEG, WebP, GIF (first frame), BMP and TIFF" in message


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(label=some.sampled_from(LABELS) | some.from_regex(r"[a-z]{1,8}/[a-z0-9.+-]{1,8}", fullmatch=True))
def test_t6_the_label_is_not_asked(url, kind, label):
    data = saved(arrow(), kind)
    assert inspect(url, uri(data, label))["media"][0]["format"].upper() == kind


def test_t8_one_picture_sent_in_every_way_is_one_picture(url, root, site):
    files, where = site
    data = saved(arrow(8), "PNG")
    files["/a.png"] = data
    (root / "a b.png").write_bytes(data)
    first = told(ask(url, uri(data)))
    for source in (
        uri(saved(arrow(8), "BMP"), "image/bmp"),
        f"{where}/a.png",
        f"file://{root}/a%20b.png",
        "data:image/png," + "".join(f"%{byte:02x}" for byte in data),
        uri(data).rstrip("="),
    ):
        assert told(ask(url, source)) == (*first[:2], 0)
    bare = {"role": "user", "content": [{"type": "image_url", "image_url": uri(data)}]}
    assert httpx.post(f"{url}/v1/chat/completions", json={"messages": [bare]}, **UNSEALED).status_code == 200


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(size=some.tuples(some.integers(1, 900), some.integers(1, 900)), is_stream=some.booleans())
def test_t10_any_shape_is_answered_or_refused_before_a_stream_begins(url, size, is_stream):
    picture = uri(saved(Image.new("1", size), "PNG"))
    answer = ask(url, picture, stream=is_stream)
    found = inspect(url, picture)
    if answer.status_code == 200:
        assert not is_stream or answer.text.endswith("data: [DONE]\n\n")
        assert found["refusal"] is None
    else:
        assert "times as long as wide" in refused(answer)
        assert found["refusal"] == answer.json()["error"]


@pytest.mark.parametrize("size", [(1093, 5), (500, 19), (400, 800), (1, 1), (400, 1)])
def test_t10_the_shapes_that_broke_others_are_answered(url, size):
    told(ask(url, uri(saved(Image.new("RGB", size, "red"), "PNG"))))


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(hurt=some.data())
def test_t12_a_damaged_file_is_a_picture_or_a_400_and_the_next_one_is_served(session, url, kind, hurt):
    data = bytearray(saved(arrow(), kind))
    if hurt.draw(some.booleans()):
        data = data[: hurt.draw(some.integers(1, len(data) - 1))]
    for _ in range(hurt.draw(some.integers(1, 5))):
        data[hurt.draw(some.integers(0, len(data) - 1))] = hurt.draw(some.integers(0, 255))
    answer = ask(url, uri(bytes(data)), stream=True)
    if answer.status_code != 200:
        refused(answer)
    assert eventually(lambda: is_clean(session))


@pytest.mark.parametrize("kind", FORMATS)
def test_t12_garbage_of_many_megabytes_is_refused_at_once(url, kind):
    start = saved(arrow(), kind)[:40]
    answer = ask(url, uri(start + np.random.default_rng(0).bytes(6_000_000)))
    if kind != "BMP":  # whose header is followed by any pixels there are
        refused(answer)
    told(ask(url, uri(saved(arrow(), kind))))


def test_a_bad_picture_among_good_ones_is_told_by_its_number(url):
    good = uri(saved(arrow(), "PNG"))
    assert "picture 2 of 3: " in refused(ask(url, good, uri(b"GIF89a"), good))
    sights = inspect(url, good, uri(b"GIF89a"), good)["media"]
    assert [sight["error"] is None for sight in sights] == [True, False, True]
