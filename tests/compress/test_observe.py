"""Scales over calibration steps, and gradients where streams meet."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import pytest
import torch

from triptych.compress.observe import INTERVALS, ObserverConfig, ScaleObserver, alignment, watching
from triptych.core.spec import Modality
from triptych.errors import ConfigError


def batches(count: int, spread: float = 0.02) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield (1 + spread * torch.randn((), generator=generator)) * torch.tensor([[0.5, -1.0], [0.25, 0.75]])


def plain_scale(peaks: list[float], interval: int, momentum: float) -> float:
    """The exponential mean of each interval's greatest peak."""
    scale = None
    for start in range(0, len(peaks) - interval + 1, interval):
        newest = max(peaks[start : start + interval]) / 127
        scale = newest if scale is None else (1 - momentum) * scale + momentum * newest
    assert scale is not None
    return scale


@pytest.mark.parametrize("interval", [1, 3, 7])
def test_the_scale_is_an_exponential_mean_of_each_intervals_peak(interval: int):
    observer = ScaleObserver(config=ObserverConfig(interval=interval, tolerance=0.0))
    seen = list(batches(50, spread=0.5))
    for x in seen:
        observer.see(x)

    assert observer.scale == pytest.approx(plain_scale([float(x.abs().max()) for x in seen], interval, 0.1))
    assert observer.num_updates == 50 // interval


@pytest.mark.parametrize("interval", [1, 10, 50])
def test_a_steady_input_settles_after_the_first_update_and_eight_still_ones(interval: int):
    observer = ScaleObserver(config=ObserverConfig(interval=interval))
    for _ in range(20 * interval):
        observer.see(torch.ones(3))

    assert observer.is_settled
    assert observer.num_steps == 9 * interval


def test_a_drifting_input_never_settles():
    observer = ScaleObserver()
    for step in range(100):
        observer.see(torch.tensor([1.2**step]))

    assert not observer.is_settled


def test_a_settled_scale_ignores_what_comes_after():
    observer = ScaleObserver()
    for x in batches(40):
        observer.see(x)
    settled = observer.scale

    observer.see(torch.tensor([1e6]))

    assert observer.is_settled
    assert observer.scale == settled


def test_one_great_move_starts_the_count_again():
    observer = ScaleObserver()
    for value in (*[1.0] * 8, 9.0, *[1.8] * 7):
        observer.see(torch.tensor([value]))

    assert not observer.is_settled


def test_a_momentum_under_the_tolerance_is_refused_for_it_would_always_settle():
    with pytest.raises(ConfigError, match="above the tolerance"):
        ObserverConfig(momentum=0.01)


def test_only_the_inputs_named_are_watched_and_all_pass_unchanged():
    observers = {"layers.0.mlp.fc1": ScaleObserver()}
    see = watching(observers)
    x = torch.tensor([[127.0, -254.0]])

    assert see("layers.0.mlp.fc1", x) is x
    assert see("layers.0.mlp.fc2", 9 * x) is not None
    assert observers["layers.0.mlp.fc1"].scale == 2.0


def test_the_articles_intervals_are_kept_by_tower():
    assert INTERVALS == {Modality.IMAGE: 50, Modality.AUDIO: 10}


def test_alignment_has_norms_their_ratio_and_which_channels_are_pulled(caplog: pytest.LogCaptureFixture):
    gradients = {
        Modality.IMAGE: torch.tensor([[3.0, 4.0, 0.0], [-3.0, 4.0, 0.0]]),
        Modality.AUDIO: torch.tensor([[0.3, -0.4, 0.0]]),
        Modality.TEXT: torch.tensor([[0.0, 0.0, 2.0]]),
    }
    with caplog.at_level(logging.INFO):
        found = alignment(7, gradients)

    assert found.norms == pytest.approx({Modality.IMAGE: 5.0, Modality.AUDIO: 0.5, Modality.TEXT: 2.0})
    assert found.ratio == pytest.approx(10)
    assert found.cosines[Modality.IMAGE, Modality.AUDIO] == pytest.approx(1)
    assert found.cosines[Modality.IMAGE, Modality.TEXT] == pytest.approx(0)
    assert "step 7" in caplog.text


def test_a_stream_without_gradient_has_an_infinite_ratio():
    assert alignment(0, {Modality.IMAGE: torch.ones(1, 2), Modality.AUDIO: torch.zeros(1, 2)}).ratio == math.inf
