"""Decoder processes may hang, crash, eat memory or be killed: one request pays, the next is served."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from triptych.core.spec import ImageSpec
from triptych.errors import BackendError, MediaError, OverloadError
from triptych.media.fetch import DecoderConfig, Decoders
from triptych.media.fetch.decoders import GIVES_WAY
from triptych.media.image import ImageLimits, read

LIMITS = ImageLimits()
SPEC = ImageSpec(
    tiling="split",
    tile_size=32,
    tokens_per_tile=4,
    resample="lanczos",
    longest_edge=128,
    placeholder="<image>",
    open_mark="<f>",
    grid_mark="<{row},{col}>",
    whole_mark="<g>",
)

MISBEHAVE = """
import os, sys, time
import triptych.media.image.worker as worker

def read(data, limits, spec):
    if data == b"hang":
        time.sleep(60)
    if data == b"spin":
        while True:
            pass
    if data == b"crash":
        os.abort()
    if data == b"talk":
        print("libraries print what they like", flush=True)
    if data == b"hoard":
        bytearray(3 * 2**30)
    return honest(PICTURE, limits, spec)

honest, worker.read = worker.read, read
from PIL import Image
import io
stream = io.BytesIO()
Image.new("RGB", (40, 30), "red").save(stream, "PNG")
PICTURE = stream.getvalue()
worker.main(int(sys.argv[1]), float(sys.argv[2]))
"""

COMMAND = (sys.executable, "-c", MISBEHAVE)


def png(width: int = 50, height: int = 40, seed: int = 0) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    pool = Decoders()
    yield pool
    pool.close()


@pytest.fixture
def misbehaving() -> Iterator[Decoders]:
    pool = Decoders(DecoderConfig(num_workers=1, deadline_s=1.0, max_wait_s=0.2, command=COMMAND))
    yield pool
    pool.close()


def test_a_picture_is_prepared_as_in_this_process(decoders):
    there, here = decoders.prepare(png(), LIMITS, SPEC), read(png(), LIMITS, SPEC)
    assert there.content_sha256 == here.content_sha256
    assert there.size == here.size
    assert np.array_equal(there.tiles, here.tiles)
    assert np.array_equal(there.take, here.take)
    assert there.tiles.dtype == np.uint8
    assert there.take.dtype == np.int32


def test_errors_come_back_with_their_numbers_and_hints(decoders):
    with pytest.raises(MediaError, match="50×40 PNG cannot be decoded: ") as caught:
        decoders.prepare(png()[:2000], LIMITS, SPEC)
    assert caught.value.hint is not None
    with pytest.raises(MediaError, match="2,000 in all; the limit is 10"):
        decoders.prepare(png(), ImageLimits(max_pixels=10), SPEC)
    assert decoders.prepare(png(), LIMITS, SPEC).size == (50, 40)


def test_the_same_picture_has_one_digest_in_every_format(decoders):
    image = Image.open(io.BytesIO(png()))
    digests = set()
    for kind in ("PNG", "BMP", "TIFF"):
        stream = io.BytesIO()
        image.save(stream, kind)
        digests.add(decoders.prepare(stream.getvalue(), LIMITS, SPEC).content_sha256)
    assert len(digests) == 1


def test_many_threads_share_few_workers(decoders):
    sizes: dict[int, tuple[int, int]] = {}

    def work(index: int) -> None:
        sizes[index] = decoders.prepare(png(20 + index, 30), LIMITS, SPEC).size

    threads = [threading.Thread(target=work, args=(index,)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes == {index: (20 + index, 30) for index in range(12)}
    assert len(decoders.process_ids) <= 2


def test_a_worker_gives_way_within_the_servers_own_session(decoders):
    """Linux shares processors between sessions before it looks at niceness; Ctrl-C goes to a group of processes."""
    decoders.prepare(png(), LIMITS, SPEC)
    for worker in decoders.process_ids:
        assert os.getpriority(os.PRIO_PROCESS, worker) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + GIVES_WAY)
        assert os.getsid(worker) == os.getsid(0)
        assert os.getpgid(worker) != os.getpgid(0)


def test_a_worker_killed_while_idle_is_replaced_unnoticed(decoders):
    decoders.prepare(png(), LIMITS, SPEC)
    for process_id in decoders.process_ids:
        os.kill(process_id, signal.SIGKILL)
    wait_until(lambda: not decoders.process_ids)
    assert decoders.prepare(png(), LIMITS, SPEC).size == (50, 40)


def test_a_worker_killed_at_work_costs_one_request(misbehaving):
    errors: list[MediaError] = []

    def work() -> None:
        try:
            misbehaving.prepare(b"hang", LIMITS, SPEC)
        except MediaError as error:
            errors.append(error)

    misbehaving.prepare(b"", LIMITS, SPEC)
    (process_id,) = misbehaving.process_ids
    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.1)
    os.kill(process_id, signal.SIGKILL)
    thread.join()

    assert "killed from outside" in errors[0].message
    assert errors[0].hint == "send it again"
    assert misbehaving.prepare(b"", LIMITS, SPEC).size == (40, 30)
    assert process_id not in misbehaving.process_ids


def test_a_decode_that_hangs_is_killed_at_its_deadline(misbehaving):
    misbehaving.prepare(b"", LIMITS, SPEC)
    began = time.monotonic()
    with pytest.raises(MediaError, match="was not decoded within 1 s"):
        misbehaving.prepare(b"hang", LIMITS, SPEC)
    assert time.monotonic() - began < 20
    assert misbehaving.prepare(b"", LIMITS, SPEC).size == (40, 30)


def test_a_decode_that_computes_too_long_is_ended():
    pool = Decoders(DecoderConfig(cpu_s=0.2, command=COMMAND))
    with pytest.raises(MediaError, match=r"more than 0\.2 s of computing"):
        pool.prepare(b"spin", LIMITS, SPEC)
    assert pool.prepare(b"", LIMITS, SPEC).size == (40, 30)
    pool.close()


def test_a_crash_costs_one_request(misbehaving):
    with pytest.raises(MediaError, match="ended its decoder"):
        misbehaving.prepare(b"crash", LIMITS, SPEC)
    assert misbehaving.prepare(b"", LIMITS, SPEC).size == (40, 30)


def test_memory_is_limited(misbehaving):
    with pytest.raises(MediaError):
        misbehaving.prepare(b"hoard", LIMITS, SPEC)
    assert misbehaving.prepare(b"", LIMITS, SPEC).size == (40, 30)


def test_what_libraries_print_does_not_reach_the_answers(misbehaving):
    assert misbehaving.prepare(b"talk", LIMITS, SPEC).size == (40, 30)


def test_who_waits_too_long_is_told_to_come_back(misbehaving):
    misbehaving.prepare(b"", LIMITS, SPEC)
    hanging = threading.Thread(target=lambda: pytest.raises(MediaError, misbehaving.prepare, b"hang", LIMITS, SPEC))
    hanging.start()
    wait_until(lambda: misbehaving._free._value == 0)
    with pytest.raises(OverloadError) as caught:
        misbehaving.prepare(b"", LIMITS, SPEC)
    assert caught.value.retry_after_s == 1.0
    hanging.join()


def test_a_worker_that_is_killed_while_it_starts_costs_nobody_anything():
    pool = Decoders(DecoderConfig(command=COMMAND))
    pool.start()
    (process_id,) = pool.process_ids
    os.kill(process_id, signal.SIGKILL)
    assert pool.prepare(b"", LIMITS, SPEC).size == (40, 30)
    pool.close()


def test_a_worker_that_does_not_start_is_not_the_pictures_fault():
    pool = Decoders(DecoderConfig(command=(sys.executable, "-c", "raise SystemExit(3)")))
    with pytest.raises(BackendError, match="ended with code 3"):
        pool.prepare(png(), LIMITS, SPEC)
    pool.close()


def test_closing_ends_every_worker_and_refuses_more():
    pool = Decoders()
    pool.start()
    pool.prepare(png(), LIMITS, SPEC)
    process_ids = pool.process_ids
    pool.close()
    assert not any(is_running(process_id) for process_id in process_ids)
    with pytest.raises(MediaError, match="closing"):
        pool.prepare(png(), LIMITS, SPEC)


def test_a_worker_loads_pillow_and_numpy_and_nothing_of_a_server():
    program = "import triptych.media.image.worker, sys; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"openvino", "torch", "transformers", "tokenizers", "httpx", "starlette", "asyncio", "jinja2", "scipy"}
    assert not heavy & set(loaded)


def is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
