"""The probes: graphs as the compiler writes them, bytes counted from them, samples of positive seconds."""

from __future__ import annotations

import os

import numpy as np
import pytest

from triptych.backends import probe
from triptych.backends.base import Placement
from triptych.backends.probe import Asked, Reader, burst, pinned, product_model
from triptych.compile.graph import Store

KIB = 1 << 10


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(probe, "BURST_S", 1e-4)
    monkeypatch.setattr(probe, "WIDTH", 64)
    monkeypatch.setattr(probe, "LARGE", 64 * KIB)
    monkeypatch.setattr(probe, "OPERATORS", 8)


def operations(value) -> list[tuple[str, str, list[int]]]:
    """Of one weight, from its end back to its codes: type, element type and shape of each node."""
    found, waiting = [], [value if hasattr(value, "get_type_name") else value.get_node()]
    while waiting:
        node = waiting.pop(0)
        shape = list(node.get_output_partial_shape(0).to_shape())
        found.append((node.get_type_name(), node.get_output_element_type(0).get_type_name(), shape))
        waiting += [node.input_value(index).get_node() for index in range(node.get_input_size())]
    return found


@pytest.mark.parametrize("precision", probe.BITS)
def test_weights_are_held_as_the_compiler_holds_them(precision):
    weight = np.random.default_rng(0).standard_normal((128, 128)).astype(np.float32) * 0.1

    ours = probe._weight(precision, 128, np.random.default_rng(0))

    assert operations(ours) == operations(Store(precision).weight("w", weight))


@pytest.mark.parametrize(("precision", "bits"), [("fp32", 32), ("bf16", 16), ("int8", 8), ("int4", 4.25)])
def test_the_bytes_of_weights_are_counted_from_the_graph(precision, bits):
    asked = Asked(tiers={}, nodes={}, stream_bytes=2 * 256 * 256 * 4, precisions=(precision,), rows=(1, 3))

    found = probe._products(precision, asked, Placement())

    assert [one.rows for one in found] == [1, 3]
    for one in found:
        assert bits <= one.weight_bytes * 8 / one.num_weights < bits + 0.7
        assert one.num_weights * probe.BITS[precision] / 8 == pytest.approx(asked.stream_bytes, rel=0.01)


@pytest.mark.parametrize("precision", probe.BITS)
def test_numbers_keep_their_size_through_a_chain(precision):
    run = probe.open_model(product_model(precision, 4, 128), Placement(compute="float"))

    out = run({"x": np.random.default_rng(1).standard_normal((8, 128), np.float32)})["y"]

    assert 0.3 < out.std() < 3


def test_everything_that_was_asked_has_a_sample_each_round():
    asked = Asked(
        tiers={"L1": 16 * KIB, "DRAM": 256 * KIB}, nodes={"node:0": (0,), "node:1": (0,)}, stream_bytes=32 * KIB,
        rows=(1, 2), tiles=(16 * KIB, 64 * KIB), groups=(1, 2), devices=("cpu:0",), num_rounds=2, most_spread=9.0,
    )  # fmt: skip

    found = probe.probe(asked, Placement())

    assert len(found.launch) == 2
    assert len(found.products) == 4 * 2
    assert [one.tier for one in found.reads] == ["L1", "DRAM"]
    assert len(found.slices) == 4 * 4  # between two nodes in every direction
    assert len(found.copies) == 2
    for group in (found.products, found.reads, found.copies, found.slices):
        assert all(len(taken) == 2 and min(taken) > 0 for taken in group.values())


def test_a_round_that_others_disturbed_counts_for_nothing():
    asked = Asked(
        tiers={}, nodes={}, stream_bytes=16 * KIB, precisions=("int8",), rows=(1,), num_rounds=2, most_spread=9.0
    )
    shares = iter([0.9, 0.01, 0.6, 0.02])  # the first is of what was before

    found = probe.probe(asked, Placement(), lambda: next(shares))

    assert found.busy == [0.01, 0.6, 0.02]
    assert len(found.launch) == 2
    assert [len(taken) for taken in found.products.values()] == [2]


def test_figures_that_spread_too_far_get_more_rounds(monkeypatch):
    asked = Asked(tiers={}, nodes={}, stream_bytes=16 * KIB, precisions=("int8",), rows=(1,), num_rounds=3)
    seconds = iter([0.9, 2.0, 3.1, 2.0, 2.0, 2.0])
    subject = probe.Product(precision="int8", rows=1, num_weights=1, weight_bytes=1)
    monkeypatch.setattr(probe, "_products", lambda precision, asked, placement: {subject: lambda: next(seconds)})

    found = probe.probe(asked, Placement())

    assert found.products[subject] == [0.9, 2.0, 3.1, 2.0]  # the middle half: 1.45 to 2.55, then 1.7 to 2.3


def test_a_machine_that_is_never_quiet_is_given_up():
    asked = Asked(tiers={}, nodes={}, stream_bytes=16 * KIB, precisions=("int8",), rows=(1,), num_rounds=2)

    found = probe.probe(asked, Placement(), lambda: 0.5)

    assert found.launch == []
    assert len(found.busy) == 4


def test_each_thread_reads_its_share_of_a_tile_as_often_as_the_group_says(monkeypatch):
    seen = []
    monkeypatch.setattr(probe, "BURST_S", 0.0)
    monkeypatch.setattr(probe, "_read", lambda tile, group, cpu, numbers: seen.append((tile, group, len(numbers))))
    reader = Reader(64 * KIB, (0, 0), (0,))

    reader.seconds(16 * KIB, 4)

    assert seen[-2:] == [(KIB, 4, 4 * KIB)] * 2  # numbers of eight bytes


def test_a_thread_is_pinned_only_for_a_while():
    before = os.sched_getaffinity(0)

    with pinned(min(before)):
        assert os.sched_getaffinity(0) == {min(before)}
    with pinned(10_000):  # a processor that is not ours
        pass

    assert os.sched_getaffinity(0) == before


def test_a_burst_is_two_runs_at_least():
    runs = []

    burst(lambda: runs.append(1))

    assert len(runs) >= 2
