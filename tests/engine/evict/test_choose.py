"""Budgets, floors and what is never forgotten."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.policy import KVPolicy
from triptych.engine.evict.choose import Context, budgets, choose, counts
from triptych.errors import ConfigError

TEXT, IMAGE = 0, 1


def context(modality, *, protected: int = 0, **policy) -> Context:
    facts = {"method": "knorm", "budget": 0.5, "sinks": 1, "window": 2} | policy
    return Context(policy=KVPolicy(**facts), modality=np.array(modality, np.uint8), num_protected=protected)


def test_without_measured_density_every_layer_has_the_same():
    assert budgets(KVPolicy(budget=0.3), 100, 3).tolist() == [30, 30, 30]


def test_density_alone_moves_nothing():
    assert budgets(KVPolicy(budget=0.3, layer_density=(3.0, 1.0)), 100, 2).tolist() == [30, 30]


def test_a_fifth_of_the_budget_follows_the_density():
    dense = budgets(KVPolicy(budget=0.5, layer_density=(3.0, 1.0), adaptive=0.2), 100, 2)
    assert dense.tolist() == [55, 45]  # 0.8 · 50 + 0.2 · 2 · 50 · 3/4, and · 1/4


def test_what_a_full_layer_cannot_take_goes_to_the_others():
    dense = budgets(KVPolicy(budget=0.95, layer_density=(8.0, 1.0, 1.0), adaptive=0.2), 100, 3)
    assert dense.tolist() == [100, 93, 93]


@settings(deadline=None)
@given(budget=st.floats(0.01, 1), num_tokens=st.integers(1, 500), density=st.lists(st.floats(0.01, 1), min_size=1))
def test_budgets_have_the_mean_that_was_asked(budget, num_tokens, density):
    found = budgets(KVPolicy(budget=budget, layer_density=tuple(density), adaptive=0.2), num_tokens, len(density))
    assert (found <= num_tokens).all()
    assert budget * num_tokens - 1e-3 <= found.mean() < budget * num_tokens + 1


def test_sinks_the_system_message_and_the_window_stay_whatever_their_score():
    asked = context([TEXT] * 10, protected=3)
    assert choose(np.arange(10), np.arange(10), asked, 6).tolist() == [0, 1, 2, 7, 8, 9]
    assert choose(-np.arange(10), np.arange(10), asked, 6).tolist() == [0, 1, 2, 3, 8, 9]


def test_a_floor_is_met_before_the_best_of_all():
    asked = context([TEXT] * 4 + [IMAGE] * 4 + [TEXT] * 4, floors={"image": 0.5})
    scores = np.array([9, 9, 9, 9, 0, 1, 2, 3, 9, 9, 9, 9])
    assert choose(scores, np.arange(12), asked, 6).tolist() == [0, 1, 6, 7, 10, 11]


def test_what_must_stay_passes_the_budget():
    asked = context([TEXT] * 4 + [IMAGE] * 8, floors={"image": 0.75}, budget=0.1)
    assert counts(asked, 2).tolist() == [7, 7]  # one sink, and six of the picture, two of them in the window


def test_of_equals_the_earlier_stays():
    assert choose(np.zeros(8), np.arange(8), context([TEXT] * 8), 5).tolist() == [0, 1, 2, 6, 7]


def test_a_budget_of_all_is_all():
    asked = context([TEXT, IMAGE] * 20, budget=1.0)
    assert counts(asked, 3).tolist() == [40] * 3
    assert choose(np.random.default_rng(0).random(40), np.arange(40), asked, 40).tolist() == list(range(40))


@settings(deadline=None)
@given(
    modality=st.lists(st.sampled_from([TEXT, IMAGE]), min_size=1, max_size=60),
    budget=st.floats(0.05, 1),
    floor=st.floats(0, 1),
    protected=st.integers(0, 10),
    seed=st.integers(0, 99),
)
def test_a_choice_is_as_long_as_its_count_and_keeps_every_promise(modality, budget, floor, protected, seed):
    asked = context(modality, budget=budget, floors={"image": floor}, protected=min(protected, len(modality)))
    tokens, scores = np.arange(len(modality)), np.random.default_rng(seed).random(len(modality))
    (count,) = counts(asked, 1)

    rows = choose(scores, tokens, asked, int(count))

    assert len(rows) == count
    assert set(np.flatnonzero(asked.is_forced(tokens))) <= set(rows)
    assert (asked.modality[rows] == IMAGE).sum() >= floor * (asked.modality == IMAGE).sum() - 1e-9
    assert rows.tolist() == sorted(set(rows.tolist()))


@pytest.mark.parametrize("facts", [{"floors": {"smell": 0.5}}, {"floors": {"image": 2}}, {"layer_density": (0.1, 0)}])
def test_a_policy_that_means_nothing_is_refused(facts):
    with pytest.raises(ConfigError):
        KVPolicy(**facts)
