"""From samples to a device: medians, spreads, and everything that must not be believed."""

from __future__ import annotations

import dataclasses
import itertools

import msgspec
import pytest

from triptych.backends.probe import Copy, Probed, Product, Read, Sliced
from triptych.core.device import Figure, Rate
from triptych.errors import MeasurementError
from triptych.plan.measure import check, describe, questions
from triptych.plan.system import Cache, Node, System
from triptych.plan.topology import Slice, hit_share

MIB = 1 << 20
SYSTEM = System(
    cpu="Planted", cpus=(0, 1), caches=(Cache(level=2, num_bytes=2 * MIB), Cache(level=3, num_bytes=32 * MIB)),
    memory_bytes=16 << 30, nodes=(Node(number=0, cpus=(0, 1), distances=(10,)),), cards=(), links=(),
)  # fmt: skip
SPREAD = (0.97, 1.0, 1.0, 1.04, 0.98)
RATES = {"L2": 200e9, "L3": 100e9, "DRAM": 40e9}


def around(seconds: float, shape=SPREAD) -> list[float]:
    return [seconds * share for share in shape]


def product(rows: int, seconds: float) -> dict[Product, list[float]]:
    one = Product(precision="int8", rows=rows, num_weights=96 * MIB, weight_bytes=96 * MIB)
    return {one: around(seconds)}


def probed(**changes) -> Probed:
    """A machine of 40 GB/s whose slices go at (1 - hits) of main memory's and hits of the last cache's share."""
    stream = 128 * MIB
    slices = {}
    for size in questions(SYSTEM).tiles:
        for group in (1, 4):
            speed = 40e9 + 60e9 * hit_share(Slice(tile_bytes=size, group=group), 32 * MIB)
            piece = Sliced(source="node:0", target="node:0", num_bytes=stream, tile_bytes=size, group=group)
            slices[piece] = around(stream / speed)
    parts = {
        "launch": around(3e-6),
        "products": product(1, 96 * MIB / 36e9) | product(512, 0.12),
        "reads": {Read(tier=tier, num_bytes=size): around(size / RATES[tier])
                  for tier, size in questions(SYSTEM).tiers.items()},
        "slices": slices,
        "copies": {Copy(target="gpu:0", num_bytes=size): around(2e-6 + size / 10e9) for size in (4096, 64 * MIB)},
        "busy": [0.02] * 5,
    }  # fmt: skip
    return Probed(**(parts | changes))


def spec(**changes):
    return describe(probed(**changes), SYSTEM, "planted")


def with_memory(bytes_per_s: float):
    """The same machine, another bandwidth written by hand."""
    found = spec()
    memory = msgspec.structs.replace(found.tiers[-1], bytes_per_s=Figure.exact(bytes_per_s))
    return msgspec.structs.replace(found, tiers=(*found.tiers[:-1], memory))


def test_a_figure_is_a_median_with_its_extremes():
    found = spec()

    memory = found.tiers[-1]
    assert (memory.name, memory.num_bytes) == ("DRAM", 16 << 30)
    assert memory.bytes_per_s.value == pytest.approx(40e9)
    assert memory.bytes_per_s.lowest == pytest.approx(40e9 / 1.04)
    assert memory.bytes_per_s.highest == pytest.approx(40e9 / 0.97)
    assert memory.bytes_per_s.num_samples == 5
    assert [tier.name for tier in found.tiers] == ["L2", "L3", "DRAM"]


def test_one_measurement_is_operations_and_bytes():
    (one, many) = spec().rates

    assert one.weight_bytes_per_s.value == pytest.approx(36e9)
    assert one.flops.value == pytest.approx(2 * 36e9)
    assert many.flops.value == pytest.approx(2 * 512 * 96 * MIB / 0.12)


def test_a_way_through_memory_has_bandwidth_and_what_it_is_worth():
    link = spec().links[0]

    assert (link.source, link.target, link.kind, link.numa_distance) == ("node:0", "node:0", "memory", 10)
    assert link.bytes_per_s.value == pytest.approx(40e9)
    assert link.worth.alpha == pytest.approx(1.0, abs=0.03)
    assert link.worth.beta == pytest.approx(0.6, abs=0.03)
    assert link.worth.error < 0.02


def test_each_nodes_ways_are_held_against_its_own_part_of_the_cache():
    """Two nodes: a core and 16 MiB of cache at 50 GB/s each, memory at 20 GB/s near and 10 GB/s far."""
    nodes = (Node(number=0, cpus=(0,), distances=(10, 21)), Node(number=1, cpus=(1,), distances=(21, 10)))
    two = dataclasses.replace(SYSTEM, nodes=nodes)
    slices = {}
    for source, target in itertools.product(("node:0", "node:1"), repeat=2):
        memory = 20e9 if source == target else 10e9
        for size, group in itertools.product(questions(two).tiles, (1, 4)):
            speed = memory + (50e9 - memory) * hit_share(Slice(tile_bytes=size, group=group), 16 * MIB)
            piece = Sliced(source=source, target=target, num_bytes=128 * MIB, tile_bytes=size, group=group)
            slices[piece] = around(128 * MIB / speed)

    links = [link for link in describe(probed(slices=slices), two, "two").links if link.worth]

    assert [(link.kind, link.numa_distance) for link in links] == [
        ("memory", 10),
        ("numa", 21),
        ("numa", 21),
        ("memory", 10),
    ]
    near, far = links[0].worth, links[1].worth
    assert (near.alpha, near.beta) == (pytest.approx(1.0, abs=0.05), pytest.approx(0.6, abs=0.05))
    assert (far.alpha, far.beta) == (pytest.approx(0.93, abs=0.1), pytest.approx(0.8, abs=0.05))


def test_a_copy_into_a_device_has_bandwidth_and_latency():
    link = spec().links[1]

    assert (link.source, link.target, link.kind, link.worth) == ("cpu:0", "gpu:0", "pcie", None)
    assert link.bytes_per_s.value == pytest.approx(10e9, rel=0.01)
    assert link.latency_s.value == pytest.approx(2.4e-6, rel=0.01)


def test_a_measured_machine_is_kept_as_json():
    found = spec()

    assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found


def test_a_cache_slower_than_memory_is_refused():
    reads = {Read(tier=tier, num_bytes=size): around(size / (RATES | {"L3": 20e9})[tier])
             for tier, size in questions(SYSTEM).tiers.items()}  # fmt: skip

    with pytest.raises(MeasurementError, match=r"L3 is read at 20.0 GB/s, slower than DRAM at 40.0 GB/s"):
        spec(reads=reads)


def test_samples_that_lie_far_apart_are_refused():
    launch_and_all = probed()
    reads = dict(launch_and_all.reads)
    memory = next(one for one in reads if one.tier == "DRAM")
    reads[memory] = around(memory.num_bytes / 40e9, (0.5, 0.6, 1.0, 1.5, 1.9))

    with pytest.raises(
        MeasurementError, match="reading from DRAM: the middle half of its 5 samples lies 90% of their median apart"
    ):
        spec(reads=reads)


def test_a_machine_that_others_use_is_refused():
    with pytest.raises(
        MeasurementError, match="of 14 rounds 2 were undisturbed, 5 are the least: others used up to 40%"
    ):
        spec(launch=[3e-6] * 2, busy=[0.02, 0.4] * 2 + [0.3] * 10)


def test_a_machine_that_slows_down_as_it_warms_up_is_refused():
    products = product(1, 96 * MIB / 36e9) | product(512, 0.12)
    hot = next(one for one in products if one.rows == 512)
    products[hot] = around(0.12, (0.8, 0.85, 0.95, 1.05, 1.2, 1.25))

    with pytest.raises(MeasurementError, match="became 33% slower in the course of it: the processor is throttled"):
        spec(products=products)


def test_a_bandwidth_written_by_hand_is_found_out():
    with pytest.raises(MeasurementError, match=r"int8 weights are read at 36.0 GB/s by 1 rows, DRAM gives 20.0 GB/s"):
        check(with_memory(20e9))


def test_a_bandwidth_far_above_what_products_reach_is_found_out():
    with pytest.raises(MeasurementError, match=r"no product reads weights at more than 36.0 GB/s"):
        check(with_memory(99e9))


@pytest.mark.parametrize("bytes_per_s", [88e9, 61e9])
def test_a_bandwidth_that_slices_of_the_same_memory_do_not_have_is_found_out(bytes_per_s):
    with pytest.raises(MeasurementError, match=rf"DRAM gives {bytes_per_s / 1e9:.1f} GB/s, read in slices 40\.0 GB/s"):
        check(with_memory(bytes_per_s))


@pytest.mark.parametrize("bytes_per_s", [36e9, 52e9])
def test_a_bandwidth_that_drifted_between_two_readings_is_believed(bytes_per_s):
    check(with_memory(bytes_per_s))


def test_more_rows_in_less_time_are_found_out():
    found = spec()
    rates = (
        *found.rates,
        Rate(precision="int8", rows=1024, flops=Figure.exact(1e15), weight_bytes_per_s=Figure.exact(9e9)),
    )

    with pytest.raises(MeasurementError, match="1024 rows took less than half the time of 512 in int8"):
        check(msgspec.structs.replace(found, rates=rates))


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_figure_that_is_no_rate_is_refused(value):
    found = spec()
    odd = msgspec.structs.replace(found.tiers[0], bytes_per_s=Figure.exact(value))

    with pytest.raises(MeasurementError, match="L2's bandwidth"):
        check(msgspec.structs.replace(found, tiers=(odd, *found.tiers[1:])))


def test_one_tier_is_not_enough():
    found = spec()

    with pytest.raises(MeasurementError, match="1 tiers of memory"):
        check(msgspec.structs.replace(found, tiers=found.tiers[-1:]))


def test_weights_are_streamed_from_beyond_the_last_cache():
    asked = questions(SYSTEM)

    assert asked.stream_bytes == 96 * MIB
    assert asked.tiers == {"L2": MIB, "L3": 16 * MIB, "DRAM": 128 * MIB}
    assert asked.nodes == {"node:0": (0, 1)}
