"""All-reduce ladders, tensor parallelism by batch, and fronts that hold what nothing dominates."""

from __future__ import annotations

import itertools

import moocore
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.device import Figure
from triptych.core.spec import DecoderSpec, RopeSpec
from triptych.errors import ConfigError, MeasurementError
from triptych.plan.pareto import AllReduce, Cell, cells, fit_ladder, front, nondominated, ring
from triptych.plan.sheets import load

SIZES = [1 << power for power in range(10, 23, 2)]
DECODER = DecoderSpec(
    num_layers=4, hidden=512, num_heads=8, num_kv_heads=4, head_dim=64, intermediate=1024, vocab_size=1000,
    max_positions=512, norm_eps=1e-5, rope=RopeSpec(theta=1e4),
)  # fmt: skip


def measured(ranks: int, lines: dict[str, tuple[float, float]], *, noise: float = 0.0) -> list[AllReduce]:
    rng = np.random.default_rng(0)
    return [
        AllReduce(
            topology="here", num_ranks=ranks, algorithm=name, num_bytes=size,
            seconds=Figure.exact((alpha + beta * size) * float(np.exp(rng.normal(0, noise)))),
        )
        for (name, (alpha, beta)), size in itertools.product(lines.items(), SIZES)
    ]  # fmt: skip


PUSH, RING = (4e-6, 3e-10), (19e-6, 1e-10)  # as vLLM's users measured them between four V100 behind one switch


@given(
    st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=30)
    | st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30)
)
def test_what_nothing_dominates_is_what_moocore_finds_ties_and_duplicates_included(rows: list[tuple[float, ...]]):
    costs = np.array(rows, float)
    assert nondominated(costs).tolist() == moocore.is_nondominated(costs).tolist()


def test_a_front_is_more_than_a_convex_hull():
    costs = [(0.0, 3.0), (1.0, 2.5), (3.0, 0.0)]  # the middle one lies above the line between the others
    assert nondominated(costs).tolist() == [True, True, True]


def test_a_ladder_is_its_lines_and_turns_where_they_cross():
    ladder = fit_ladder(measured(4, {"push": PUSH, "ring": RING}))
    assert ladder.error < 1e-9
    assert ladder.fastest(4096).algorithm == "push"
    assert ladder.fastest(4 << 20).algorithm == "ring"
    ((size, before, after),) = ladder.crossovers()
    assert (before, after) == ("push", "ring")
    assert size == pytest.approx(15e-6 / 2e-10)


def test_sums_go_over_the_devices_own_links_and_over_the_host_where_there_are_none():
    assert ring(load("h200"), 8).algorithm == "ring over nvlink"
    assert ring(load("h200"), 8).byte_s == pytest.approx(14 / 8 / 450e9)
    assert ring(load("l40s"), 2).algorithm == "ring over pcie"


def test_a_noisy_ladder_says_by_how_much_it_is_wrong():
    ladder = fit_ladder(measured(2, {"ring": RING}, noise=0.1))
    assert 0.01 < ladder.error < 0.2
    assert ladder.lines[0].byte_s == pytest.approx(RING[1], rel=0.2)


def test_no_line_has_a_time_below_zero():
    seconds = {1024: 1e-6, 4096: 5e-6, 16384: 30e-6}
    samples = [
        AllReduce(topology="here", num_ranks=2, algorithm="x", num_bytes=size, seconds=Figure.exact(value))
        for size, value in seconds.items()
    ]
    assert fit_ladder(samples).lines[0].latency_s >= 0


def test_what_is_no_ladder_is_refused():
    with pytest.raises(MeasurementError, match="one topology"):
        fit_ladder([*measured(2, {"ring": RING}), *measured(4, {"ring": RING})])
    with pytest.raises(MeasurementError, match="2 sizes were measured"):
        fit_ladder(measured(2, {"ring": RING})[:2])
    with pytest.raises(ConfigError, match="measured up to 4,194,304 B"):
        fit_ladder(measured(2, {"ring": RING})).fastest(1 << 23)


def grid(**changes: float) -> tuple[Cell, ...]:
    """A step reads 1 GB of weights at 100 GB/s and takes 1 ms for each answer, shared by the devices."""
    ladders = [fit_ladder(measured(ranks, {"push": PUSH, "ring": RING})) for ranks in (2, 4)]
    return cells(DECODER, ladders, (1, 4, 16), lambda degree, batch: (0.01 + 0.001 * batch) / degree)


def test_more_devices_answer_sooner_and_move_more():
    by = {(cell.tensor_parallel, cell.batch): cell for cell in grid()}
    assert by[1, 4].all_reduce_bytes == 0
    assert by[2, 4].all_reduce_bytes == 8 * 4 * 512 * 2
    assert by[4, 4].step_s < by[2, 4].step_s < by[1, 4].step_s
    assert by[4, 4].step_s == pytest.approx(0.014 / 4 + by[4, 4].all_reduce_s)
    assert by[4, 4].tokens_per_s < by[1, 4].tokens_per_s  # of one device


def test_a_front_holds_no_dominated_cell_and_a_planted_one_is_found():
    every = grid()
    kept = front(every, lambda cell: cell.costs)
    assert len({cell.tensor_parallel for cell in kept}) > 1
    best = next(cell for cell in kept if cell.batch == 4 and cell.tensor_parallel == 1)
    facts = {name: getattr(best, name) for name in Cell.__struct_fields__} | {"step_s": 2 * best.step_s}
    worse = Cell(**facts)
    assert worse not in front((*every, worse), lambda cell: cell.costs)


def test_a_degree_that_cuts_no_heads_is_refused():
    with pytest.raises(ConfigError, match="8 heads .* cut evenly in 3"):
        cells(DECODER, [fit_ladder(measured(3, {"ring": RING}))], (1,), lambda degree, batch: 1.0)


def test_nothing_has_no_front():
    assert front((), lambda cell: (0.0,)) == ()
