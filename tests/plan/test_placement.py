"""Placements of parts: every one that fits, copies counted, and in a plan the reason beside each."""

from __future__ import annotations

import msgspec
import pytest

from triptych.core.device import DeviceSpec, Figure, Link
from triptych.core.plan import Choice, Plan, Target
from triptych.core.spec import ProjectorSpec, VisionSpec
from triptych.core.workload import RequestKind, Sizes, Workload
from triptych.errors import ConfigError
from triptych.plan.placement import Model, PartLoad, place, with_placements
from triptych.plan.sheets import load
from triptych.plan.work import Held
from triptych.testing import tiny_manifest

HALF = (0.5, 0.5, 0.5)
VISION = VisionSpec(kind="vit", image_size=448, num_tokens=1024, hidden=1024, patch=14, num_layers=24, num_heads=16,
                    intermediate=4096, mean=HALF, std=HALF)  # fmt: skip
PROJECTOR = ProjectorSpec(kind="mlp", num_tokens=64, hidden=64)


def link(source: str, target: str, rate: float) -> Link:
    bytes_per_s = Figure(value=rate, lowest=rate, highest=rate, num_samples=5)
    return Link(source=source, target=target, kind="pcie", bytes_per_s=bytes_per_s, latency_s=Figure.exact(1e-5))


def placed(*devices: DeviceSpec, tensor_parallel: int = 1, **resident: float) -> tuple[Choice, Plan]:
    """The choice of the first device, of a plan for pictures; resident: bytes of the parts."""
    kind = RequestKind(
        name="picture", share=1, images=1, prompt=Sizes(least=16, most=32), answer=Sizes(least=8, most=8)
    )
    choice = Choice(device=devices[0].name, num_devices=tensor_parallel, tensor_parallel=tensor_parallel, batch=4,
                    predictions=(), fits=True, reason="")  # fmt: skip
    plan = Plan(model="tiny", devices=devices, workload=Workload(name="w", kinds=(kind,), rate_per_s=1.0),
                target=Target(), choices=(choice,), assumptions=())  # fmt: skip
    spec = tiny_manifest().spec
    decoder = msgspec.structs.replace(spec.decoder, num_heads=2)
    spec = msgspec.structs.replace(spec, decoder=decoder, vision=VISION, projector=PROJECTOR)
    model = Model(spec=spec, held=Held(decoder="int8"), resident=resident, shown=lambda kind: (64, 1))
    found = with_placements(plan, model)
    return found.choices[0], found


def test_a_part_moves_to_the_faster_device_only_if_the_copy_is_worth_it():
    memory = {"cpu:0": 8 << 30, "gpu:0": 8 << 30}
    vision = PartLoad(name="vision", seconds={"cpu:0": 0.1, "gpu:0": 0.01}, memory_bytes=1 << 20, out_bytes=1 << 20)
    decoder = PartLoad(name="decoder", seconds={"cpu:0": 0.05}, memory_bytes=1 << 20, out_bytes=0)

    near = place((vision, decoder), memory, [link("gpu:0", "cpu:0", 10e9)])[0]
    slow = place((vision, decoder), memory, [link("gpu:0", "cpu:0", 5e6)])[0]
    back = place((vision, decoder), memory, [link("cpu:0", "gpu:0", 10e9)])[0]
    cut_off = place((vision, decoder), memory, [])

    assert near.placement == {"vision": "gpu:0", "decoder": "cpu:0"}
    assert back == near
    assert near.copy_s == pytest.approx(1e-5 + (1 << 20) / 10e9)
    assert near.seconds == pytest.approx(0.06 + near.copy_s)
    assert slow.placement["vision"] == "cpu:0"
    assert [one.placement["vision"] for one in cut_off] == ["cpu:0"]


def test_what_fits_nowhere_is_refused_with_numbers():
    part = PartLoad(name="decoder", seconds={"cpu:0": 1.0}, memory_bytes=2048, out_bytes=0)

    with pytest.raises(ConfigError, match=r"2,048 B of parts fit nowhere: cpu:0 1,024 B"):
        place((part,), {"cpu:0": 1024}, [])


def test_a_processor_alone_holds_every_part_and_says_so():
    choice, plan = placed(load("epyc"))

    assert set(choice.placement.values()) == {"cpu:0"}
    assert choice.placed == "one device: every part is on it"
    assert plan.assumptions == ()


def test_a_card_that_holds_every_part_keeps_them_and_the_next_best_way_is_told():
    choice, plan = placed(load("h200"))

    assert choice.placement == dict.fromkeys(("vision", "projector", "embedding", "decoder"), "gpu:0")
    assert "every part on gpu:0" in choice.placed
    assert "on cpu:0 would" in choice.placed
    assert "host is AMD EPYC 9654, assumed" in plan.assumptions[-1]


def test_what_a_card_cannot_hold_goes_to_the_processor_that_was_named_beside_it():
    choice, plan = placed(load("l4"), load("xeon"), embedding=20e9, decoder=20e9)

    assert choice.placement["embedding"] == "cpu:0"
    assert choice.placement["decoder"] == "gpu:0"
    assert "embedding on cpu:0, for gpu:0 does not hold every part" in choice.placed
    assert "Xeon" in plan.assumptions[-1]


def test_devices_that_hold_a_model_together_are_named_together():
    choice, _ = placed(load("h100"), tensor_parallel=2, decoder=100e9)

    assert choice.placement["decoder"] == "gpu:0-1"


def test_a_cache_of_fewer_heads_than_devices_is_there_more_than_once():
    """One head on two devices: twice the cache, beside weights that fit nowhere."""
    told = [placed(load("h100"), tensor_parallel=degree, decoder=900e9)[0].placed for degree in (1, 2)]
    alone, together = (int(one.split(" B of parts")[0].replace(",", "")) - 900 * 10**9 for one in told)

    assert together == 2 * alone > 0


def test_a_slow_card_lets_the_host_see_pictures_where_that_is_worth_it():
    slow = msgspec.structs.replace(
        load("l4"),
        rates=tuple(msgspec.structs.replace(rate, flops=rate.flops.times(0.001)) for rate in load("l4").rates),
    )
    choice, _ = placed(slow, load("epyc"))

    assert choice.placement["vision"] == "cpu:0"
    assert choice.placement["decoder"] == "gpu:0"
    assert "ms less" in choice.placed


def test_a_model_too_large_for_both_is_told_with_numbers():
    choice, _ = placed(load("l4"), load("xeon"), decoder=900e9)

    assert choice.placement == {}
    assert "fit nowhere" in choice.placed
