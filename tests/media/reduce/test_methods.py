"""Each method against a plain literal twin, and all of them against what could break them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.policy import METHODS, Reduction
from triptych.core.request import Patches
from triptych.core.spec import Modality
from triptych.media.reduce import reduce
from triptych.media.reduce.baselines import bins
from triptych.media.reduce.diversity import STRETCH, cdpruner, cenprune, most_volume
from triptych.media.reduce.reduction import BY_NAME
from triptych.media.reduce.run import Run, spread
from triptych.media.reduce.tome import tome

SEEDS = st.integers(0, 2**32 - 1)


def run_of(seed: int, num_rows: int, width: int = 8) -> Run:
    """Rows as towers give them: a direction that all share, a few of them equal or nearly so."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(num_rows, width)) + 2 * rng.normal(size=width)
    for _ in range(num_rows // 4):
        rows[rng.integers(num_rows)] = rows[rng.integers(num_rows)] + rng.choice([0, 1e-4])
    return Run(rows=rows.astype("f4"), question=rng.normal(size=(3, width)).astype("f4"), seed=seed)


# ── centred diversity ──────────────────────────────────────────────────────────────────────────────────────────


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    norm = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / norm) if norm else 0.0


def plain_kernel(rows: np.ndarray, relevance: Sequence[float]) -> np.ndarray:
    """The paper's equations, one number at a time, in float64: L = diag(r g) S~ diag(r g)."""
    rows = rows.astype("f8")
    n, centre = len(rows), rows.mean(axis=0)
    alike = [sum(cosine(rows[i], rows[j]) for j in range(n) if j != i) / (n - 1) for i in range(n)]
    weight = [r * (max(alike) - one) / (max(alike) - min(alike)) for r, one in zip(relevance, alike, strict=True)]
    centred = [[cosine(a - centre, b - centre) for b in rows] for a in rows]
    return np.array([[weight[i] * centred[i][j] * weight[j] for j in range(n)] for i in range(n)])


def plain_choice(kernel: np.ndarray, count: int) -> list[int]:
    """Each step looks at the determinant of every set it could make."""
    chosen: list[int] = []
    while len(chosen) < count:
        left = [i for i in range(len(kernel)) if i not in chosen]
        chosen.append(max(left, key=lambda i: np.linalg.det(kernel[np.ix_([*chosen, i], [*chosen, i])])))
    return chosen


@given(SEEDS, st.integers(3, 12))
@settings(deadline=None, max_examples=60)
def test_centred_diversity_is_the_papers_determinant_step_by_step(seed: int, num_rows: int):
    rows = np.random.default_rng(seed).normal(1, 1, (num_rows, 16)).astype("f4")
    count = num_rows // 2
    plain = plain_choice(plain_kernel(rows, [1] * num_rows), count)
    assert cenprune(Run(rows=rows, question=rows[:0], seed=0), count).tolist() == plain


@given(SEEDS, st.integers(3, 12))
@settings(deadline=None, max_examples=60)
def test_with_a_question_the_kernel_is_weighted_by_relevance(seed: int, num_rows: int):
    rng = np.random.default_rng(seed)
    rows, question = rng.normal(1, 1, (num_rows, 16)).astype("f4"), rng.normal(1, 1, (3, 16)).astype("f4")
    near = [np.mean([cosine(row, word) for word in question]) for row in rows]
    relevance = [np.exp(0.5 * (one - min(near)) / (max(near) - min(near))) for one in near]
    count = num_rows // 2
    plain = plain_choice(plain_kernel(rows, relevance), count)
    assert cdpruner(Run(rows=rows, question=question, seed=0), count).tolist() == plain


@given(st.integers(1, 3000), st.data())
@settings(deadline=None, max_examples=10)
def test_a_long_run_is_chosen_from_evenly(num_rows: int, data):
    count = data.draw(st.integers(1, num_rows))
    rows = np.random.default_rng(count).normal(size=(num_rows, 3)).astype("f4")
    kept = cenprune(Run(rows=rows, question=rows[:0], seed=0), count)
    assert len(set(kept.tolist())) == count
    for start in range(0, num_rows - STRETCH, STRETCH):
        share = ((kept >= start) & (kept < start + STRETCH)).sum() / STRETCH
        assert abs(share - count / num_rows) < 0.6


def test_equal_rows_are_the_last_to_stay():
    """Fifty alike and four of their own: of five that stay, four are those."""
    rng = np.random.default_rng(5)
    own, shared = rng.normal(size=(4, 64)), rng.normal(size=64)
    rows = (np.concatenate([np.tile(shared, (50, 1)), own]) + 1).astype("f4")
    kept = cenprune(Run(rows=rows, question=rows[:0], seed=0), 5)
    assert set(kept.tolist()) >= {50, 51, 52, 53}


# ── determinants ───────────────────────────────────────────────────────────────────────────────────────────────


@given(SEEDS, st.integers(2, 12))
@settings(deadline=None, max_examples=60)
def test_each_step_takes_the_row_that_gives_the_largest_determinant(seed: int, num_rows: int):
    rng = np.random.default_rng(seed)
    factor = rng.normal(size=(num_rows, num_rows + 2))
    kernel = (factor @ factor.T).astype("f4")
    chosen = most_volume(kernel, num_rows).tolist()
    for at in range(num_rows):
        dets = {
            i: np.linalg.slogdet(kernel[np.ix_([*chosen[:at], i], [*chosen[:at], i])].astype("f8"))[1]
            for i in range(num_rows)
            if i not in chosen[:at]
        }
        assert dets[chosen[at]] >= max(dets.values()) - 1e-2


@given(SEEDS, st.integers(3, 10))
@settings(deadline=None, max_examples=40)
def test_two_rows_are_nearly_the_best_two_of_all(seed: int, num_rows: int):
    """Greedy is within a factor k! of the best determinant (Civril 2009): log 2 for two, squared volumes: 2 log 2."""
    rng = np.random.default_rng(seed)
    factor = rng.normal(size=(num_rows, 6))
    kernel = (factor @ factor.T).astype("f4")

    def volume(some) -> float:
        return np.linalg.slogdet(kernel[np.ix_(some, some)].astype("f8"))[1]

    best = max(volume(list(some)) for some in itertools.combinations(range(num_rows), 2))
    assert volume(most_volume(kernel, 2).tolist()) >= best - 2 * np.log(2) - 1e-3


def test_of_rows_alike_distinct_the_one_that_is_asked_for_comes_first():
    rows = np.eye(8, dtype="f4") + np.float32(0.1)
    for asked in range(8):
        kept = cdpruner(Run(rows=rows, question=rows[[asked, asked]], seed=0), 2)
        assert kept[0] == asked


def tower(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A picture as a ViT gives it, 24 × 24 rows: a strong direction that all share, smooth changes, one large thing
    (1) and five small ones (2 to 6). Rows and what each shows."""
    rng = np.random.default_rng(seed)
    axis, shows = np.linspace(-0.5, 0.5, 24), np.zeros((24, 24), int)
    across, down, shared = rng.normal(size=(3, 64))
    rows = 3 * shared + axis[:, None, None] * down + axis[None, :, None] * across + rng.normal(size=(24, 24, 64)) * 0.1
    for thing, side in enumerate((8, 2, 2, 2, 2, 2), 1):
        top, left = rng.integers(0, 24 - side, 2)
        rows[top : top + side, left : left + side] += rng.normal(size=64)
        shows[top : top + side, left : left + side] = thing
    return rows.reshape(-1, 64).astype("f4"), shows.ravel()


def test_diversity_finds_every_small_thing_of_a_picture_where_a_grid_and_chance_do_not():
    found = {method: [] for method in METHODS if method not in ("tome", "pool")}
    for seed in range(8):
        rows, shows = tower(seed)
        small = set(shows.tolist()) - {0, 1}
        for method, shares in found.items():
            kept = BY_NAME[method](Run(rows=rows, question=rows[:0], seed=seed), 64)[1]
            shares.append(len(small & set(shows[kept].tolist())) / len(small))
    share = {method: float(np.mean(shares)) for method, shares in found.items()}
    assert share["cenprune"] == share["cdpruner"] == 1.0
    assert max(share["grid"], share["random"]) < 0.75


# ── merging and pooling ────────────────────────────────────────────────────────────────────────────────────────


def plain_tome(rows: np.ndarray, count: int) -> tuple[np.ndarray, list[int]]:
    """Groups of rows as lists, merged round by round."""
    groups = [[i] for i in range(len(rows))]
    while len(groups) > count:
        means = [np.mean([rows[i].astype("f8") for i in group], axis=0) for group in groups]
        evens, odds = range(0, len(groups), 2), range(1, len(groups), 2)
        best = {e: max(odds, key=lambda o: (round(cosine(means[e], means[o]), 5), -o)) for e in evens}
        order = sorted(evens, key=lambda e: (-round(cosine(means[e], means[best[e]]), 5), e))
        leaving = order[: min(len(groups) - count, -(-len(groups) // 8))]
        for e in leaving:
            groups[best[e]] = groups[best[e]] + groups[e]
        groups = sorted((g for i, g in enumerate(groups) if i not in leaving), key=min)
    return np.stack([rows[g].mean(axis=0) for g in groups]), [min(g) for g in groups]


@given(SEEDS, st.integers(2, 24), st.data())
@settings(deadline=None, max_examples=60)
def test_merging_is_that_of_plain_groups(seed: int, num_rows: int, data):
    rows = np.random.default_rng(seed).normal(size=(num_rows, 4)).astype("f4")
    count = data.draw(st.integers(1, num_rows - 1))
    merged, places = tome(Run(rows=rows, question=rows[:0], seed=0), count)
    plain, firsts = plain_tome(rows, count)
    assert places.tolist() == firsts
    np.testing.assert_allclose(merged, plain, atol=2e-5)


def test_every_row_weighs_alike_in_what_is_merged():
    run = run_of(3, 33)
    merged, _ = tome(run, 1)
    np.testing.assert_allclose(merged[0], run.rows.mean(axis=0), atol=1e-5)


@pytest.mark.parametrize(
    ("num_rows", "count", "first"), [(16, 4, [0, 1, 4, 5]), (32, 8, [0, 1, 2, 3]), (16, 5, [0, 1, 2, 3])]
)
def test_a_square_is_pooled_by_blocks_and_the_rest_by_stretches(num_rows, count, first):
    assert bins(num_rows, count)[0].tolist() == first


@given(st.integers(2, 600), st.data())
def test_bins_hold_every_row_once_and_differ_little(num_rows: int, data):
    count = data.draw(st.integers(1, num_rows - 1))
    found = bins(num_rows, count)
    assert len(found) == count
    assert sorted(row for own in found for row in own) == list(range(num_rows))
    assert max(map(len, found)) <= 4 * min(map(len, found))


def test_chance_is_the_same_for_the_same_item():
    run, kept = run_of(1, 50), []
    for seed in (7, 7, 8):
        kept.append(BY_NAME["random"](Run(rows=run.rows, question=run.question, seed=seed), 20)[1].tolist())
    assert kept[0] == kept[1] != kept[2]


# ── all of them ────────────────────────────────────────────────────────────────────────────────────────────────

DEGENERATE = {
    "all rows equal": np.ones((9, 4)),
    "all zero": np.zeros((9, 4)),
    "some zero": np.eye(9, 4),
    "huge": np.random.default_rng(0).normal(size=(9, 4)) * 1e30,
    "tiny": np.random.default_rng(0).normal(size=(9, 4)) * 1e-30,
    "huge beside tiny": np.random.default_rng(0).normal(size=(9, 4)) * np.logspace(-30, 30, 9)[:, None],
    "two rows": np.array([[1.0, 2, 3, 4], [4.0, 3, 2, 1]]),
    "one dimension": np.arange(9.0)[:, None] - 4,
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", DEGENERATE)
def test_any_rows_are_reduced_to_any_count(method: str, name: str):
    rows = DEGENERATE[name].astype("f4")
    for count in range(1, len(rows)):
        for question in (rows[:0], rows[:1], np.zeros((2, rows.shape[1]), "f4")):
            reduced, kept = BY_NAME[method](Run(rows=rows, question=question, seed=1), count)
            assert reduced.shape == (count, rows.shape[1])
            assert reduced.dtype == np.float32
            assert np.isfinite(reduced).all()
            assert kept.dtype == np.int32
            assert len(kept) == count
            assert (np.diff(kept) > 0).all()
            assert 0 <= kept[0] <= kept[-1] < len(rows)


@pytest.mark.parametrize("method", [method for method in METHODS if method not in ("tome", "pool")])
@given(seed=SEEDS, num_rows=st.integers(2, 40), keep=st.floats(0.01, 1))
@settings(deadline=None, max_examples=30)
def test_a_method_that_selects_changes_no_row(method, seed: int, num_rows: int, keep: float):
    run = run_of(seed, num_rows)
    item = patches(num_rows, Reduction(method=method, keep=keep))
    reduced = reduce(item, run.rows, run.question)
    assert len(reduced.rows) == item.num_tokens
    assert reduced.rows.tobytes() == run.rows[reduced.kept].tobytes()


def patches(num_rows: int, reduction: Reduction, runs: tuple[int, ...] = ()) -> Patches:
    return Patches(
        digest="0123456789abcdef", modality=Modality.IMAGE, tiles=np.zeros((1, 1, 1, 3), np.uint8),
        take=np.arange(num_rows, dtype=np.int32), reduction=reduction, runs=runs,
    )  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_keeping_all_changes_nothing(method: str):
    run = run_of(2, 12)
    reduced = reduce(patches(12, Reduction(method=method, keep=1.0), (5, 7)), run.rows, run.question)
    assert reduced.rows.tobytes() == run.rows.tobytes()
    assert reduced.kept.tolist() == list(range(12))


@pytest.mark.parametrize("method", METHODS)
def test_each_run_keeps_its_own_share(method: str):
    run = run_of(2, 20)
    reduced = reduce(patches(20, Reduction(method=method, keep=0.4), (10, 1, 9)), run.rows, run.question)
    alone = reduce(patches(9, Reduction(method=method, keep=0.4)), run.rows[11:], run.question)
    assert [
        int(((first <= reduced.kept) & (reduced.kept < end)).sum()) for first, end in ((0, 10), (10, 11), (11, 20))
    ] == [4, 1, 4]
    if method != "random":
        assert (reduced.kept[5:] - 11).tolist() == alone.kept.tolist()


def test_values_that_are_all_alike_count_in_full():
    assert spread(np.full(3, 7, "f4")).tolist() == [1, 1, 1]
    assert spread(np.array([1, 2, 3], "f4")).tolist() == [0, 0.5, 1]
