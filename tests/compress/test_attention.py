"""The cross-modal measure equals plain loops, and is named for what it measures."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from numpy_decoder import random_weights, spec_of
from triptych.backends.torch_graph import Hooks, TorchPart
from triptych.compile.decoder import build
from triptych.compile.graph import Store
from triptych.compress.attention import LayerAttention, Watch, mean_layers, measure
from triptych.core.spec import Modality

T, I, A = (int(one) for one in (Modality.TEXT, Modality.IMAGE, Modality.AUDIO))  # noqa: E741
CHAT = np.array([T, T, I, I, I, T, A, A, T, T, T], np.uint8)
TOLERANCE = 2e-6  # greatest seen: 3e-7


@dataclass
class Plain:
    """Loops over rows and keys of one head."""

    logits: np.ndarray
    modality: np.ndarray

    def shares(self, row: int, keys: list[int]) -> list[float]:
        best = max(float(self.logits[row, key]) for key in keys)
        weights = [math.exp(float(self.logits[row, key]) - best) for key in keys]
        return [weight / sum(weights) for weight in weights]

    def entropies(self, rows_of: str, causal: bool) -> list[float]:
        found = []
        for row in range(len(self.modality)):
            is_text = self.modality[row] == T
            if is_text != (rows_of == "text"):
                continue
            keys = [
                k for k in range(len(self.modality)) if (self.modality[k] == T) != is_text and (k <= row or not causal)
            ]
            if len(keys) > 1:
                found.append(-sum(p * math.log(p) for p in self.shares(row, keys) if p) / math.log(len(keys)))
        return found

    def looking(self) -> list[int]:
        return [row for row in range(len(self.modality)) if self.modality[row] == T and any(self.modality[:row] != T)]

    def mass(self, kind: int) -> float:
        total = 0.0
        for row in self.looking():
            shares = self.shares(row, list(range(row + 1)))
            total += sum(share for key, share in enumerate(shares) if self.modality[key] == kind)
        return total / len(self.looking())

    def density(self) -> float:
        notable = seen = 0
        for row in self.looking():
            shares = self.shares(row, list(range(row + 1)))
            notable += sum(share >= 0.01 * max(shares) for share in shares)
            seen += row + 1
        return notable / seen

    def effective(self) -> float:
        counts = []
        for row in self.looking():
            keys = [key for key in range(row + 1) if self.modality[key] != T]
            counts.append(math.exp(-sum(p * math.log(p) for p in self.shares(row, keys) if p)))
        return sum(counts) / len(counts)


def some_logits(heads: int, size: int) -> torch.Tensor:
    return torch.randn(heads, size, size, generator=torch.Generator().manual_seed(4)) * 4


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_every_figure_is_that_of_plain_loops():
    logits = some_logits(3, len(CHAT))
    found = measure(logits, torch.from_numpy(CHAT.astype(np.int64)))
    heads = [Plain(head.numpy(), CHAT) for head in logits]

    assert found.text_media == pytest.approx(mean([e for h in heads for e in h.entropies("text", True)]), abs=TOLERANCE)
    assert found.media_text == pytest.approx(
        mean([e for h in heads for e in h.entropies("media", True)]), abs=TOLERANCE
    )
    assert found.probe == pytest.approx(mean([e for h in heads for e in h.entropies("media", False)]), abs=TOLERANCE)
    assert found.effective == pytest.approx(mean([h.effective() for h in heads]), abs=1e-5)
    assert found.density == pytest.approx(mean([h.density() for h in heads]), abs=TOLERANCE)
    for kind, name in ((T, "text"), (I, "image"), (A, "audio")):
        assert found.mass[name] == pytest.approx(mean([h.mass(kind) for h in heads]), abs=TOLERANCE)


def test_a_picture_that_comes_first_looks_at_no_text_but_in_the_probe():
    found = measure(some_logits(2, 6), torch.tensor([I, I, I, T, T, T]))
    assert found.media_text is None
    assert found.gap is None
    assert found.probe is not None
    assert found.probe_gap == pytest.approx(abs(found.text_media - found.probe))


def test_equal_logits_have_entropy_one_and_attend_to_all():
    found = measure(torch.zeros(1, 8, 8), torch.tensor([T, T, I, I, I, I, T, T]))
    assert (found.text_media, found.media_text) == pytest.approx((1.0, 1.0))
    assert found.effective == pytest.approx(4.0)
    assert found.density == 1.0


def test_text_alone_has_a_density_and_nothing_between_modalities():
    found = measure(some_logits(2, 5), torch.zeros(5, dtype=torch.int64))
    assert (found.text_media, found.media_text, found.probe, found.effective) == (None, None, None, None)
    assert found.mass == {"text": pytest.approx(1.0)}
    assert 0 < found.density <= 1


def test_a_watch_sees_the_attention_that_a_decoder_computes():
    spec = spec_of()
    part = TorchPart(build(spec, random_weights(spec).__getitem__, Store("fp32")))
    x = np.random.default_rng(1).standard_normal((len(CHAT), spec.hidden)).astype(np.float32)
    kept: dict[str, tuple[torch.Tensor, ...]] = {}
    watch = Watch.over(CHAT)

    def look(name: str, *heads: torch.Tensor) -> None:
        kept[name] = heads
        watch(name, *heads)

    every = np.arange(len(CHAT))
    part({"embeddings": x, "position_ids": every, "sampled": every}, Hooks(on_attention=look))

    assert list(kept) == [f"layers.{layer}.mixed" for layer in range(spec.num_layers)]
    assert len(watch.layers) == spec.num_layers
    for (query, key, _), layer, received in zip(kept.values(), watch.layers, watch.received, strict=True):
        logits = (query[0].double() @ key[0].double().mT) * spec.head_dim**-0.5
        heads = [Plain(head.numpy(), CHAT) for head in logits]
        assert layer.text_media == pytest.approx(mean([e for h in heads for e in h.entropies("text", True)]), abs=1e-5)
        assert float(received.sum()) == pytest.approx(layer.mass["image"] + layer.mass["audio"], abs=1e-5)
        assert len(received) == 5


def test_means_leave_out_what_a_sample_lacks():
    def layer(media_text: float | None, **mass: float) -> LayerAttention:
        return LayerAttention(text_media=0.5, media_text=media_text, probe=None, effective=2.0, mass=mass, density=0.1)

    (found,) = mean_layers([[layer(0.2, text=1.0)], [layer(None, text=0.5, image=0.5)]])
    assert found.media_text == pytest.approx(0.2)
    assert found.probe is None
    assert found.mass == {"image": 0.25, "text": 0.75}
