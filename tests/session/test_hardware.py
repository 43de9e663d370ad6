"""A machine's measurement from end to end, made small; the platform table of a tiny session."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace

import pytest

from triptych.backends import probe
from triptych.core.device import Figure
from triptych.core.traffic import Served, Traffic
from triptych.errors import MeasurementError
from triptych.plan.system import Cache, Node, System
from triptych.session import hardware
from triptych.session.hardware import Others, bench_session, measure_machine
from triptych.testing import tiny_session

KIB = 1 << 10
SMALL = System(
    cpu="Small", cpus=(0,), caches=(Cache(level=1, num_bytes=32 * KIB), Cache(level=2, num_bytes=512 * KIB)),
    memory_bytes=1 << 24, nodes=(Node(number=0, cpus=(0,), distances=(10,)),), cards=(), links=(),
)  # fmt: skip


def test_a_machine_is_probed_as_its_caches_and_nodes_ask(monkeypatch):
    asked = []

    def disturbed(what, placement, others, progress):
        asked.append(what)
        return probe.Probed(launch=[], products={}, reads={}, slices={}, copies={}, busy=[0.5, 0.4])

    monkeypatch.setattr(hardware, "read_system", lambda: SMALL)
    monkeypatch.setattr(probe, "probe", disturbed)

    with pytest.raises(
        MeasurementError, match="of 2 rounds 0 were undisturbed, 5 are the least: others used up to 50%"
    ):
        measure_machine()

    assert asked[0].tiers == {"L1": 16 * KIB, "L2": 256 * KIB, "DRAM": 2048 * KIB}
    assert asked[0].nodes == {"node:0": (0,)}
    assert asked[0].stream_bytes == 1 << 18


def test_others_have_what_the_processors_did_and_this_process_did_not(monkeypatch):
    times = namedtuple("times", "user system idle")
    machine = iter([times(10.0, 0.0, 90.0), times(16.0, 2.0, 92.0)])
    own = iter([times(1.0, 1.0, 0.0), times(4.0, 2.0, 0.0)])
    monkeypatch.setattr(hardware.psutil, "cpu_times", lambda: next(machine))
    monkeypatch.setattr(hardware.psutil.Process, "cpu_times", lambda self: next(own))

    assert Others()() == pytest.approx((8 - 4) / 10)


def test_the_platform_table_has_answers_and_the_bandwidth_they_use(monkeypatch):
    monkeypatch.setattr(hardware, "_memory", lambda: Figure.exact(30e9))
    monkeypatch.setattr(hardware, "PROMPT", 16)
    monkeypatch.setattr(hardware, "ANSWER", 8)

    with tiny_session() as session:
        found = bench_session(session)

    names = [row.name for row in found.rows]
    assert names[0] == "tokens a second, one answer"
    assert names[1].endswith("together, prompts' time included")
    assert names[2:] == ["decoder's weights read, one answer", "memory gives", "bandwidth used"]
    assert all(row.figure.lowest <= row.figure.value <= row.figure.highest for row in found.rows)


def test_pictures_are_booked_by_the_engines_own_clock():
    """Each takes 20 ms of the encoder, 5 ms of the projector and 50 ms of prefill; the first one opens the encoder."""
    seconds = {}

    def ask(question, images, max_tokens):
        opening = 9.0 if not seconds else 0.0
        for stage, taken in (("encode", 0.02 + opening), ("project", 0.005), ("prefill", 0.05)):
            seconds[stage, "image"] = seconds.get((stage, "image"), 0.0) + taken
        return SimpleNamespace(usage=SimpleNamespace(image_tokens=64, prompt_tokens=80))

    session = SimpleNamespace(
        manifest=SimpleNamespace(spec=SimpleNamespace(vision=True)), ask=ask,
        stats=lambda: SimpleNamespace(stage_seconds=dict(seconds)),
    )  # fmt: skip

    encode, prefill, first = hardware._pictures(session, lambda what, share: None)

    assert encode.figure.value == pytest.approx(40)
    assert (prefill.name, prefill.figure.value) == ("prefill, 64 image tokens of 80", pytest.approx(50))
    assert first.figure.num_samples == hardware.NUM_PICTURES


def test_a_run_of_which_a_request_failed_is_no_row(monkeypatch):
    def failed(session, workload, progress):
        one = Served(kind="text", asked_s=0.0, done_s=1.0, error="the queue is full")
        return Traffic(workload=workload, served=(one,), wall_s=1.0, cpu_s=1.0, peak_bytes=0, mean_bytes=0)

    monkeypatch.setattr(hardware, "serve", failed)
    session = SimpleNamespace(plan=SimpleNamespace(max_num_seqs=4))

    with pytest.raises(MeasurementError, match="1 of 1 requests failed, the first: the queue is full"):
        list(hardware._answers(session, lambda what, share: None))
