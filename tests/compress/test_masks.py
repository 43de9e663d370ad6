"""Cross-modal masks: exact where hard, true gradients where continuous, nothing where nothing is to be cut."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from triptych.compress.masks import (
    CrossModalMask,
    MaskConfig,
    effective_number,
    hard_top_k,
    renormalised,
    soft_top_k,
    straight_through,
)
from triptych.core.spec import Modality
from triptych.errors import ConfigError

TEXT, IMAGE = int(Modality.TEXT), int(Modality.IMAGE)
LAID_OUT = torch.tensor([TEXT] * 3 + [IMAGE] * 6 + [TEXT] * 4)


def some_logits(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def causal(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


def mask(text_k: int = 2, image_k: int = 2, **facts: object) -> CrossModalMask:
    return CrossModalMask(MaskConfig(k={Modality.TEXT: text_k, Modality.IMAGE: image_k}, **facts))


def plain(logits: Tensor, allowed: Tensor, k: dict[int, int]) -> Tensor:
    """The same by loops over one head's rows."""
    out = torch.zeros_like(logits)
    for row in range(len(logits)):
        own = int(LAID_OUT[row])
        seen = [key for key in range(logits.shape[1]) if allowed[row, key]]
        foreign = sorted((key for key in seen if LAID_OUT[key] != own), key=lambda key: (-float(logits[row, key]), key))
        kept = [key for key in seen if LAID_OUT[key] == own] + foreign[: k[own]]
        total = sum(math.exp(float(logits[row, key])) for key in kept)
        for key in kept:
            out[row, key] = math.exp(float(logits[row, key])) / total
    return out


def test_hard_masks_are_those_of_plain_loops():
    logits = some_logits(3, 13, 13)
    held = mask(2, 1).eval()(logits, LAID_OUT, LAID_OUT, causal(13))
    for head in range(3):
        torch.testing.assert_close(held[head], plain(logits[head], causal(13), {TEXT: 2, IMAGE: 1}))


@pytest.mark.parametrize("kind", ["straight_through", "continuous"])
def test_a_k_of_all_keys_changes_nothing(kind):
    logits = some_logits(2, 13, 13)
    wide = mask(6, 13, kind=kind)
    full = torch.softmax(logits.masked_fill(~causal(13), -math.inf), -1)
    for module in (wide.train(), wide.eval()):
        torch.testing.assert_close(module(logits, LAID_OUT, LAID_OUT, causal(13)), full)


def test_keys_of_the_own_modality_are_left_alone():
    logits = some_logits(13, 13)
    held = mask(1, 1).eval()(logits, LAID_OUT, LAID_OUT, causal(13))
    own = (LAID_OUT[:, None] == LAID_OUT[None, :]) & causal(13)
    full = torch.softmax(logits.masked_fill(~causal(13), -math.inf), -1)
    for row in range(13):
        ratio = held[row][own[row]] / full[row][own[row]]
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))
    assert int((held > 0).sum()) == int(own.sum()) + 6 + 4  # image rows see one text key each, later text one image key


def test_straight_through_is_hard_forward_and_soft_backward():
    scores = some_logits(5, 8).requires_grad_()
    among, k = torch.ones(5, 8, dtype=torch.bool), torch.full((5, 1), 3)
    through = straight_through(scores, k, among, 0.5)
    assert torch.equal(through.detach(), hard_top_k(scores.detach(), k, among))

    weights = some_logits(5, 8, seed=1)
    (through * weights).sum().backward()
    twin = scores.detach().clone().requires_grad_()
    last = twin.topk(3, -1).values[:, -1:]
    (torch.sigmoid((twin - last) / 0.5) * weights).sum().backward()
    torch.testing.assert_close(scores.grad, twin.grad)
    assert float(scores.grad.abs().max()) > 0


def test_continuous_weights_sum_to_k():
    among = torch.rand(6, 20, generator=torch.Generator().manual_seed(2)) < 0.7
    k = torch.tensor([[1], [2], [3], [4], [5], [6]])
    weights = soft_top_k(some_logits(6, 20), k, among, 0.3)
    torch.testing.assert_close(weights.sum(-1, keepdim=True), k.double(), rtol=1e-9, atol=1e-9)
    assert not weights[~among].any()


def test_continuous_weights_become_hard_as_tau_falls():
    among, k = torch.ones(4, 9, dtype=torch.bool), torch.full((4, 1), 4)
    scores = some_logits(4, 9)
    torch.testing.assert_close(soft_top_k(scores, k, among, 1e-4), hard_top_k(scores, k, among), atol=1e-6, rtol=0)


def test_the_continuous_gradient_is_that_of_finite_differences():
    among = torch.ones(2, 7, dtype=torch.bool)
    among[1, 5:] = False
    k = torch.tensor([[3], [2]])
    weights = some_logits(2, 7, seed=3)

    def value(scores: Tensor) -> Tensor:
        return (renormalised(scores, soft_top_k(scores, k, among, 0.7)) * weights).sum()

    assert torch.autograd.gradcheck(value, some_logits(2, 7).requires_grad_(), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["straight_through", "continuous"])
@pytest.mark.parametrize("tau", [1.0, 1e-3])
def test_ties_and_rows_without_foreign_keys_give_no_nan(kind, tau):
    for logits in (torch.zeros(2, 13, 13), torch.full((2, 13, 13), -80.0), 500 * some_logits(2, 13, 13).float()):
        module = mask(kind=kind, tau=(tau, tau))
        logits = logits.masked_fill(~causal(13), -math.inf).requires_grad_()
        held = module(logits, LAID_OUT, LAID_OUT, causal(13))
        (held[:, 9:, 4] * 3).sum().backward()
        assert bool(held.isfinite().all())
        assert bool(logits.grad.isfinite().all())
        torch.testing.assert_close(held.detach().sum(-1), torch.ones(2, 13))


def test_of_equals_exactly_k_stay_and_the_earlier_ones():
    kept = hard_top_k(torch.zeros(1, 6), torch.tensor([[2]]), torch.tensor([[False, True, True, True, True, True]]))
    assert kept.tolist() == [[0, 1, 1, 0, 0, 0]]


def test_scores_may_choose_in_place_of_the_logits():
    logits = torch.zeros(13, 13, dtype=torch.float64)
    scores = torch.arange(13.0, dtype=torch.float64).expand(13, 13)
    held = mask(1, 1).eval()(logits, LAID_OUT, LAID_OUT, causal(13), scores)
    assert held[12, 3:9].nonzero().tolist() == [[5]]


def test_a_dynamic_k_follows_the_effective_number():
    logits = torch.zeros(2, 13)
    logits[1, 3] = 30.0  # the second row looks at one image token alone
    held = mask(2, 2, reference=3.0).eval()(logits, LAID_OUT[[11, 12]], LAID_OUT, torch.ones(2, 13, dtype=torch.bool))
    kept = (held[:, 3:9] > 0).sum(-1)
    assert kept.tolist() == [4, 1]  # 2 · 6 / 3, and 2 · 1 / 3 rounded


def test_the_effective_number_counts_equals_and_is_one_for_one_or_none():
    among = torch.tensor([[True] * 4, [True, False, False, False], [False] * 4])
    torch.testing.assert_close(effective_number(torch.zeros(3, 4), among), torch.tensor([[4.0], [1.0], [1.0]]))


def test_annealing_goes_from_the_first_to_the_last_temperature():
    module = mask(tau=(1.0, 0.01))
    module.anneal(0.5)
    assert module.tau == pytest.approx(0.1)
    module.anneal(1.0)
    assert module.tau == pytest.approx(0.01)


def test_a_mask_that_keeps_nothing_is_refused():
    with pytest.raises(ConfigError, match="k is at least 1"):
        MaskConfig(k={Modality.TEXT: 0})
