"""A step's time by the device's figures, and by what was fitted to other models' steps."""

from __future__ import annotations

import msgspec
import pytest
from tests.plan.test_work import SPEC as DECODER

from triptych.core.device import DeviceSpec, Figure, Rate, Tier
from triptych.core.spec import Counted, ModelSpec, ProjectorSpec, VisionSpec
from triptych.errors import ConfigError, MeasurementError
from triptych.plan.costs import SeenStep
from triptych.plan.efficiency import SeenModel, as_step, fit_efficiency
from triptych.plan.roofline import Roofline, rate_of
from triptych.plan.sheets import load
from triptych.plan.work import Chunk, Held, Step, decoder_work


def figure(value: float) -> Figure:
    return Figure(value=value, lowest=value, highest=value)


def rate(rows: int, flops: float) -> Rate:
    return Rate(precision="int8", rows=rows, flops=figure(flops), weight_bytes_per_s=figure(flops / 2 / rows))


DEVICE = DeviceSpec(
    name="made up",
    kind="cpu",
    source="assumed",
    num_cores=2,
    memory_bytes=1 << 34,
    tiers=(
        Tier(name="L3", num_bytes=1 << 20, bytes_per_s=figure(1e11)),
        Tier(name="DRAM", num_bytes=1 << 34, bytes_per_s=figure(1e10)),
    ),
    rates=(rate(1, 4e10), rate(64, 1e11)),
    launch_s=figure(1e-6),
)
HELD = Held(decoder="int8")


def model(**changes: int) -> ModelSpec:
    return ModelSpec(family="text", decoder=msgspec.structs.replace(DECODER, **changes), eos_ids=(0,))


def test_few_rows_wait_for_memory_and_many_for_arithmetic() -> None:
    line = Roofline(spec=model(hidden=4096, vocab_size=64), held=HELD, device=DEVICE)

    alone, many = (line.parts(step)["layers"] for step in (Step(answers=1), Step(chunks=(Chunk(num_tokens=512),))))
    assert alone.memory_s > alone.compute_s
    assert many.compute_s > many.memory_s


def test_what_fits_the_cache_is_read_at_its_speed() -> None:
    """Rates of few rows are those of main memory: a model in the cache does not wait for that."""
    device = load("epyc")
    cache, memory = (tier.bytes_per_s.value for tier in device.tiers)
    for spec, bandwidth in ((model(), cache), (model(hidden=8192, vocab_size=64 << 10), memory)):
        work = decoder_work(spec.decoder, HELD, Step(answers=1))["layers"]
        told = Roofline(spec=spec, held=HELD, device=device).parts(Step(answers=1))["layers"]
        assert told.total_s - told.launch_s == pytest.approx(work.weight_bytes / bandwidth)


def test_no_cache_lets_many_rows_be_computed_faster() -> None:
    assert rate_of(DEVICE, "int8", 1, faster=2.0) == 8e10
    assert rate_of(DEVICE, "int8", 64, faster=10.0) == 1e11


def test_a_tower_that_was_counted_is_held_by_what_is_large_enough_for_its_weights() -> None:
    """They are told as bytes, not as weights."""
    device, half = load("epyc"), (0.5, 0.5, 0.5)
    counted = Counted(num_weights=10**9, flops=1.0)
    vision = VisionSpec(kind="conv", image_size=64, num_tokens=1, hidden=8, mean=half, std=half, counted=counted)
    projector = ProjectorSpec(kind="mlp", num_tokens=1, hidden=8)
    spec = msgspec.structs.replace(model(), vision=vision, projector=projector)

    tower_s = Roofline(spec=spec, held=HELD, device=device).tower_s(1)["vision"]

    assert tower_s == pytest.approx(1e9 / device.tiers[-1].bytes_per_s.value, rel=1e-2)


def test_rates_are_held_beyond_the_last_row_and_a_precision_without_any_takes_the_next_wider() -> None:
    assert rate_of(DEVICE, "int8", 4096) == 1e11
    assert rate_of(DEVICE, "int4", 64) == pytest.approx(1e11)
    assert 4e10 < rate_of(DEVICE, "int8", 8) < 1e11
    with pytest.raises(ConfigError, match="no rate"):
        rate_of(msgspec.structs.replace(DEVICE, rates=()), "int8", 1)


def truth(spec: ModelSpec, step: Step) -> float:
    """Seconds by a rule of the fit's own kind."""
    works = decoder_work(spec.decoder, HELD, step).values()
    decoder = spec.decoder
    queries, keys = (decoder.num_layers * decoder.head_dim * n for n in (decoder.num_heads, decoder.num_kv_heads))
    weights = sum(work.num_weights * (1e-10 + 2e-11 * work.rows) for work in works if work.num_weights)
    attention = 2e-12 * (queries + keys) * step.cached + 1e-14 * queries * step.pairs
    return weights + attention + 1e-5 * decoder.num_layers + 1e-4


def seen(spec: ModelSpec) -> SeenModel:
    shapes = [(n, n * 40, 0) for n in (1, 2, 4, 8, 16, 32)] + [(4, 4096, 0), (1, 1024, 0)]
    shapes += [(0, 0, prompt) for prompt in (8, 32, 64, 128, 512)]
    bare = [SeenStep(answers=n, cached=cached, prompt=prompt, seconds=(1.0,)) for n, cached, prompt in shapes]
    steps = [msgspec.structs.replace(one, seconds=(truth(spec, as_step(one)),)) for one in bare]
    return SeenModel(spec=spec, held=HELD, steps=tuple(steps))


def test_a_model_never_run_is_predicted_from_the_steps_of_others() -> None:
    known = [seen(model()), seen(model(hidden=256, num_layers=6)), seen(model(hidden=512, num_layers=4))]
    fitted = fit_efficiency(DEVICE, known)
    here = msgspec.structs.replace(DEVICE, efficiency=fitted)
    other = model(hidden=384, num_layers=5, num_kv_heads=4)  # keys for every head, where known ones share them

    assert fitted.error < 0.02
    for step in (Step(answers=1, cached=50), Step(answers=12, cached=2000), Step(chunks=(Chunk(num_tokens=256),))):
        told = Roofline(spec=other, held=HELD, device=here).step_s(step)
        assert told == pytest.approx(truth(other, step), rel=0.1)


def test_one_model_alone_does_not_tell_layers_from_weights() -> None:
    with pytest.raises(MeasurementError, match="at least 2"):
        fit_efficiency(DEVICE, [seen(model())])


def test_a_precision_that_no_model_had_is_told() -> None:
    known = [seen(model()), seen(model(hidden=256))]
    here = msgspec.structs.replace(DEVICE, efficiency=fit_efficiency(DEVICE, known))

    with pytest.raises(ConfigError, match="only in int8"):
        Roofline(spec=model(), held=Held(decoder="bf16"), device=here).step_s(Step(answers=1))
