"""Smoothing: the product stays, what is hard moves, and a shared scale is set by the loudest."""

import numpy as np
import torch

from triptych.compress.smooth import modality_scales, sharing, smooth_scales
from triptych.core.spec import Modality

TEXT, IMAGE, AUDIO = Modality.TEXT, Modality.IMAGE, Modality.AUDIO


def tokens(seed: int, loudness: float = 1.0, width: int = 48) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    channels = loudness * np.exp(rng.standard_normal(width))
    return torch.from_numpy((rng.standard_normal((100, width)) * channels).astype(np.float32))


def test_scales_are_the_papers_channel_by_channel():
    x_max, w_max = [4.0, 9.0, 0.0], [1.0, 4.0, 2.0]

    found = smooth_scales(torch.tensor(x_max), torch.tensor(w_max), alpha=0.75)

    plain = [x**0.75 / w**0.25 if x else 1.0 for x, w in zip(x_max, w_max, strict=True)]
    torch.testing.assert_close(found, torch.tensor(plain))


def test_the_product_is_unchanged():
    x, weight = tokens(0), tokens(1)[:16]

    scales = smooth_scales(x.abs().amax(0), weight.abs().amax(0))

    torch.testing.assert_close((x / scales) @ (weight * scales).T, x @ weight.T, rtol=1e-4, atol=1e-3)


def test_shared_scales_are_those_of_the_loudest_in_each_channel():
    loud, quiet = tokens(0, 30.0).abs().amax(0), tokens(1).abs().amax(0)

    scales = modality_scales({AUDIO: loud, TEXT: quiet}, torch.ones(48))

    torch.testing.assert_close(scales[None], smooth_scales(torch.maximum(loud, quiet), torch.ones(48)))


def test_the_quiet_modality_loses_most_by_sharing_and_its_own_step_wins_some_back():
    found = sharing({IMAGE: tokens(0, 30.0), TEXT: tokens(1), AUDIO: tokens(2)}, torch.ones(48))

    assert found[TEXT].lost > 10  # dB
    assert abs(found[IMAGE].lost) < 3
    assert found[TEXT].shared < found[TEXT].own_step < found[TEXT].own_scales


def test_one_modality_alone_loses_nothing():
    found = sharing({TEXT: tokens(1)}, torch.ones(48))

    assert found[TEXT].lost == 0
