"""A part that runs aside: the same numbers as in the plain way, on threads that give way."""

import os
import sys
import threading
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op

from triptych.backends import aside
from triptych.backends.aside import GIVES_WAY
from triptych.backends.base import Placement
from triptych.backends.ov import compile_part, open_part
from triptych.errors import BackendError

EXACT = Placement(compute="float", num_threads=2)


def open_aside(path: Path, placement: Placement):
    """With all its copies."""
    part = aside.open_aside(path, placement)
    for thread in threading.enumerate():
        if thread.name == "triptych-opening":
            thread.join()
    return part


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """Two products and a constant: tiles (n, 4, 4, 3) u8 → embeddings (n, 16, 8), extra (2, 8)."""
    generator = np.random.default_rng(3)
    pixels = op.parameter([-1, 4, 4, 3], np.uint8, name="pixels")
    rows = op.reshape(op.convert(pixels, "f32"), op.constant([0, 16, 3]), special_zero=True)
    for width in (3, 32):
        weights = op.constant(generator.standard_normal((width, 32 if width == 3 else 8)).astype(np.float32))
        rows = op.gelu(op.matmul(rows, weights, False, False), "erf")
    extra = op.result(op.constant(np.arange(16, dtype=np.float32).reshape(2, 8)))
    found = op.result(rows)
    pixels.output(0).set_names({"pixels"})
    found.input_value(0).set_names({"embeddings"})
    extra.input_value(0).set_names({"extra"})
    target = tmp_path_factory.mktemp("part") / "vision.xml"
    ov.save_model(ov.Model([found, extra], [pixels]), target, compress_to_fp16=False)
    return target


@pytest.mark.parametrize("num_tiles", [1, 2, 5])
def test_tiles_have_the_same_numbers_as_in_the_plain_way(path, num_tiles):
    tiles = np.random.default_rng(1).integers(0, 256, (num_tiles, 4, 4, 3)).astype(np.uint8)
    aside, plain = open_aside(path, EXACT)({"pixels": tiles}), open_part(path, EXACT)({"pixels": tiles})
    np.testing.assert_allclose(aside["embeddings"], plain["embeddings"], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(aside["extra"], plain["extra"])


def test_a_tile_has_the_same_bits_whatever_is_computed_with_it(path):
    part = open_aside(path, EXACT)
    tiles = np.random.default_rng(2).integers(0, 256, (5, 4, 4, 3)).astype(np.uint8)
    together = part({"pixels": tiles})["embeddings"]
    alone = [part({"pixels": tiles[index : index + 1]})["embeddings"] for index in range(5)]
    np.testing.assert_array_equal(together, np.concatenate(alone))


def test_no_graph_is_made_beside_another_of_the_same_model(path):
    """OpenVINO spoils them now and then: a picture's numbers were another's (docs/journal.md)."""
    part = open_aside(path, EXACT)
    copies = [request.get_compiled_model() for request in part._requests]
    assert [copy.get_property("NUM_STREAMS") for copy in copies] == [1, 1]


def test_a_copy_that_cannot_be_opened_leaves_the_first_at_work(path, monkeypatch, caplog):
    made = []

    def once(*arguments, **named):
        made.append(compile_part(*arguments, **named) if not made else None)
        return made[-1]  # of the second no request can be made

    monkeypatch.setattr(aside, "compile_part", once)
    part = open_aside(path, EXACT)
    assert "a copy of vision.xml cannot be opened" in caplog.text
    assert part({"pixels": np.zeros((3, 4, 4, 3), np.uint8)})["embeddings"].shape == (3, 16, 8)


def test_large_weights_have_no_copies(path, monkeypatch):
    monkeypatch.setattr(aside, "COPIES_BYTES", 8)
    assert len(open_aside(path, EXACT)._requests) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is a thread's own on Linux alone")
def test_its_threads_give_way_and_who_calls_it_does_not(path):
    def nice() -> dict[str, int]:
        return {name: os.getpriority(os.PRIO_PROCESS, int(name)) for name in os.listdir("/proc/self/task")}

    before = nice()
    part = open_aside(path, EXACT)
    part({"pixels": np.zeros((2, 4, 4, 3), np.uint8)})
    after = nice()
    assert all(after[name] == value for name, value in before.items() if name in after)
    assert sum(value == GIVES_WAY for value in after.values()) >= 2, "OpenVINO keeps them for the next model"


def test_what_it_cannot_take_is_told(path, tmp_path):
    with pytest.raises(BackendError, match="the input is 'pixels'"):
        open_aside(path, EXACT)({"pictures": np.zeros((1, 4, 4, 3), np.uint8)})
    with pytest.raises(BackendError, match="CPU"):
        open_aside(path, EXACT)({"pixels": np.zeros((1, 4, 5, 3), np.uint8)})
    with pytest.raises(BackendError, match="cannot read"):
        open_aside(tmp_path / "none.xml", EXACT)
