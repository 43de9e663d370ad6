"""Reports: everything stands on the page itself, in the page's colours, and nothing that was passed in is markup."""

from __future__ import annotations

import re
import sys

import msgspec
import pytest

from triptych.core.device import DeviceSpec, Figure, Rate, Tier
from triptych.core.plan import Choice, Plan, Prediction, Target
from triptych.core.workload import RequestKind, Sizes, Workload
from triptych.errors import ConfigError
from triptych.plan.batch import Found
from triptych.plan.plots import Mark, drawn, front
from triptych.plan.points import Point, Spread
from triptych.plan.report import curve_page, number, plan_page, saving_page
from triptych.plan.saving import FACTORS, Run, Saving, kept_of, plan_runs, saving_of

KIND = RequestKind(name="text & <b>", share=1, prompt=Sizes(least=8, most=64), answer=Sizes(least=4, most=16))
WORKLOAD = Workload(name="chat", kinds=(KIND,), rate_per_s=2.0)


def figure(value: float) -> Figure:
    return Figure(value=value, lowest=0.9 * value, highest=1.1 * value, num_samples=3)


def plan(*, checked: bool = False) -> Plan:
    device = DeviceSpec(
        name="a <machine>", kind="cpu", source="measured", num_cores=2, memory_bytes=10**10,
        tiers=tuple(Tier(name=name, num_bytes=10**9, bytes_per_s=figure(rate)) for name, rate in
                    (("L3", 8e10), ("DRAM", 3e10))),
        rates=(Rate(precision="int8", rows=1, flops=figure(8e11), weight_bytes_per_s=figure(3e10)),),
        launch_s=figure(5e-6),
    )  # fmt: skip
    choices = tuple(
        Choice(
            device="a <machine>", num_devices=1, batch=batch, fits=batch < 9, reason="cheapest",
            predictions=(
                Prediction(name="tpot_p50", unit="s", value=0.01 * batch, lowest=0.005, highest=0.2,
                           measured=0.02 if checked else None),
                Prediction(name="tokens_per_s", unit="tokens/s", value=100.0 * batch**0.5, lowest=80, highest=900),
            ),
        )
        for batch in (1, 4, 16)
    )  # fmt: skip
    return Plan(
        model="tiny", devices=(device,), workload=WORKLOAD, target=Target(tpot_s=0.1), choices=choices,
        assumptions=("nothing else runs",),
    )  # fmt: skip


def saving() -> Saving:
    factors = tuple(FACTORS)
    runs = [
        Run(on=on, cpu_s=10 * 0.9 ** len(on), wall_s=5, peak_bytes=10**9, ttft_p95_s=0.5 * 0.9 ** len(on),
            latency_p95_s=1.0, num_requests=8, answer_tokens=80)
        for on in plan_runs(factors)
    ]  # fmt: skip
    plain, ours, saved, effects = saving_of(runs, factors)
    kept = kept_of([True] * 9 + [False], [True] * 9 + [False])
    return Saving(
        name="tiny", workload=WORKLOAD, about=("one < two",), baseline=plain, ours=ours, saved=saved, effects=effects,
        num_questions=10, right=(9, 9), kept=kept,
    )  # fmt: skip


def check_alone(page: str) -> None:
    """No script, nothing fetched, no colour of its own outside the page's two palettes."""
    assert "<script" not in page
    assert not re.findall(r"(?:src|href)=[\"'](?!#)", page.replace("xlink:href", "href"))
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        assert set(re.findall(r"#[0-9a-f]{6}", svg)) <= {"#000000", "#ffffff"}  # clip paths and the like


def test_a_plans_page_holds_its_figures_and_plots():
    page = plan_page(plan(), (Mark(name="decode", x=2, y=6e10),))
    check_alone(page)
    assert page.count("<svg") == 2
    for said in ("10 ms", "30 GB/s", "5 µs", "2.0 requests a second", "nothing else runs", "decode"):
        assert said in page
    assert "It fits" in page


def test_a_plans_page_says_how_requests_come_as_it_was_planned():
    closed = msgspec.structs.replace(WORKLOAD, arrivals="closed", concurrency=3)
    asked = msgspec.structs.replace(plan(), workload=closed)
    assert "As many callers as are answered at once" in plan_page(asked)
    assert "7.0 requests a second" in plan_page(msgspec.structs.replace(asked, target=Target(requests_per_s=7.0)))


def test_a_curves_page_shows_the_batch_that_was_found():
    spread = Spread(p50=0.1, p95=0.2, p99=0.3)
    points = tuple(
        Point(concurrency=count, requests_per_s=1, tokens_per_s=50 * count, latency_s=1, ttft=spread, tpot=spread,
              latency=spread, num_requests=9)
        for count in (1, 2, 4)
    )  # fmt: skip
    found = Found(batch=2, least=1, most=3, bounds=(), predictions=plan().choices[0].predictions, reason="it does")
    page = curve_page("tiny <b>", points, found)
    check_alone(page)
    assert page.count("<svg") == 1
    for said in ("2 at once: it does", "likely 1 to 3", "callers at once", "each token after it, p50", "&lt;b&gt;"):
        assert said in page


def test_what_was_measured_stands_beside_what_was_predicted():
    page = plan_page(plan(checked=True))
    assert "<td>20 ms</td><td>-50.0%</td>" in page


def test_a_savings_page_says_whether_it_holds():
    page = saving_page(saving())
    check_alone(page)
    assert "57.0%" in page
    assert "At the same quality and no worse p95." in page
    assert all(name in page for name in FACTORS)


def test_names_are_no_markup():
    assert "<machine>" not in plan_page(plan())
    assert "text &amp; &lt;b&gt;" in plan_page(plan())
    assert "one &lt; two" in saving_page(saving())


def test_a_drawing_is_the_same_each_time_and_names_the_front():
    marks = (Mark(name="a", x=1, y=1), Mark(name="b", x=2, y=3), Mark(name="beaten", x=3, y=2))
    assert front(marks, "x", "y") == front(marks, "x", "y")
    assert ">b<" in front(marks, "x", "y")


def test_reports_without_matplotlib_say_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install .*plan"):
        drawn(lambda canvas: None)


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [(0.0351, "s", "35.1 ms"), (2.5, "s", "2.5 s"), (4e-6, "s", "4 µs"), (1.26e9, "B", "1.26 GB"),
     (8.66e11, "FLOP/s", "866 GFLOP/s"), (1234.5, "tokens/s", "1,234 tokens/s"), (209.4, "tokens/s", "209 tokens/s")],
)  # fmt: skip
def test_numbers_are_said_as_people_say_them(value: float, unit: str, said: str):
    assert number(value, unit) == said
